"""One asyncio client for etcd: the few verbs that Whimbrel needs, each with a deadline and one kind of failure.

Wraps aetcd. Several endpoints are tried in turn: a call that fails moves on to the next one, and the caller sees
`Unreachable`, because whether a write took effect is then unknown and only the caller knows how to find out. A request that
etcd answers with a refusal is another error: asking again would not help.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

import aetcd
from aetcd import rpc
from aetcd.utils import prefix_range_end

from whimbrel.errors import NotFound, Unreachable, WhimbrelError
from whimbrel.limits import ETCD_ANSWER_MAX_BYTES, ETCD_CALL_TIMEOUT_S, ETCD_RETRY_S

Answer = TypeVar("Answer")

_CHANNEL_OPTIONS: Final = {
    # Find a dead peer within seconds, and come back soon after it returned: gRPC's own defaults wait minutes. etcd hangs up
    # on clients that ping more often than each 5 s, or without a call under way.
    "grpc.keepalive_time_ms": 10_000,
    "grpc.keepalive_timeout_ms": 3_000,
    "grpc.http2.max_pings_without_data": 0,
    "grpc.initial_reconnect_backoff_ms": 200,
    "grpc.max_reconnect_backoff_ms": 1_000,
    # Each client has a channel of its own, so that a lease's connection is never shared with a watch.
    "grpc.use_local_subchannel_pool": 1,
    # A whole prefix comes in one answer, and gRPC would take no more than 4 MiB.
    "grpc.max_receive_message_length": ETCD_ANSWER_MAX_BYTES,
}
# Answers that say no to this request; on anything else the connection is given up and the outcome is unknown.
_REFUSALS: Final = frozenset(
    {
        rpc.StatusCode.INVALID_ARGUMENT,
        rpc.StatusCode.FAILED_PRECONDITION,
        rpc.StatusCode.PERMISSION_DENIED,
        rpc.StatusCode.UNAUTHENTICATED,
        rpc.StatusCode.UNIMPLEMENTED,
    }
)


@dataclass(frozen=True)
class KeyValue:
    """A key as etcd has it."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    lease: int = 0


@dataclass(frozen=True)
class Compare:
    """A condition of a transaction: the key's field equals the value. A revision of 0 means that there is no such key."""

    key: str
    field: Literal["create", "mod", "value", "lease"]
    value: int | bytes

    def holds(self, found: KeyValue | None) -> bool:
        """Whether the condition is true of the key as it was read."""
        if found is None:
            return self.field != "value" and self.value == 0
        fields = {"create": found.create_revision, "mod": found.mod_revision, "lease": found.lease}
        return (found.value if self.field == "value" else fields[self.field]) == self.value


@dataclass(frozen=True)
class Put:
    key: str
    value: bytes
    lease: int = 0


@dataclass(frozen=True)
class Delete:
    key: str


@dataclass(frozen=True)
class TxnResult:
    """`revision` is the mod_revision of every key that a successful transaction put."""

    succeeded: bool
    revision: int


@dataclass(frozen=True)
class Change:
    """A key was put (`now` holds it) or removed (`now` is None) at a revision."""

    key: str
    revision: int
    now: KeyValue | None


class Compacted(Exception):
    """The history that a watch asked for is gone: list again, then watch from there."""


class Watch:
    """One watch stream. `read` returns whole revisions, in order."""

    def __init__(self, stub: Any, prefix: str, start_revision: int) -> None:
        create = rpc.WatchCreateRequest(
            key=prefix.encode(), range_end=prefix_range_end(prefix.encode()), start_revision=start_revision
        )
        self._asked = asyncio.Event()
        self._call = stub.Watch(self._requests(rpc.WatchRequest(create_request=create)))
        self._reading: asyncio.Task[Any] | None = None

    async def read(self, timeout_s: float) -> list[Change] | None:
        """The next changes, or None when there were none within the time.

        Raises:
            Compacted: the start lies before the compaction.
            Unreachable: the stream broke.
        """
        reading = self._reading = self._reading or asyncio.ensure_future(self._call.read())
        done, _ = await asyncio.wait({reading}, timeout=timeout_s)
        if not done:
            return None
        self._reading = None
        try:
            response = reading.result()
        except (rpc.AioRpcError, asyncio.CancelledError) as error:
            raise Unreachable("The watch on etcd broke.", hint="It is opened again.") from error
        if not isinstance(response, rpc.WatchResponse):  # end of stream
            raise Unreachable("etcd ended the watch.", hint="It is opened again.")
        if response.compact_revision:
            raise Compacted
        if response.canceled:
            raise Unreachable(f"etcd cancelled the watch: {response.cancel_reason}", hint="It is opened again.")
        return [_change(event) for event in response.events]

    def cancel(self) -> None:
        """End the stream."""
        self._asked.set()
        if self._reading is not None:
            self._reading.cancel()
            self._reading.add_done_callback(
                lambda task: task.cancelled() or task.exception()
            )  # nobody reads it any more
        self._call.cancel()

    async def _requests(self, create: Any) -> AsyncIterator[Any]:
        yield create
        await self._asked.wait()


class Etcd:
    """A client of an etcd cluster. To be used in one event loop.

    Every method raises Unreachable when etcd does not answer within ETCD_CALL_TIMEOUT_S, NotFound when the lease that it
    names is gone, and WhimbrelError when etcd refuses the request as such.
    """

    def __init__(self, endpoints: Sequence[str], *, timeout_s: float = ETCD_CALL_TIMEOUT_S) -> None:
        self.endpoints = list(endpoints)
        self.timeout_s = timeout_s
        self._next = 0
        self._client: Any = None  # aetcd.Client; its stubs are None in its types

    async def get(self, key: str) -> KeyValue | None:
        """The key now (linearizable), or None."""
        found = await self._call(lambda client: client.get(key.encode()))
        return None if found is None else _key_value(found)

    async def list(self, prefix: str) -> tuple[list[KeyValue], int]:
        """All keys with the prefix, sorted, and the revision at which they were read."""
        found = await self._call(lambda client: client.get_prefix(prefix.encode(), sort_order="ascend"))
        return [_key_value(item) for item in found], found.header.revision

    async def newest(self, prefix: str) -> tuple[int, int]:
        """How many keys there are below the prefix, and their highest mod_revision; says whether a copy is current."""
        request = rpc.RangeRequest(
            key=prefix.encode(),
            range_end=prefix_range_end(prefix.encode()),
            limit=1,
            keys_only=True,
            sort_order=rpc.RangeRequest.DESCEND,
            sort_target=rpc.RangeRequest.MOD,
        )
        found = await self._call(lambda client: client.kvstub.Range(request))
        return int(found.count), max((int(item.mod_revision) for item in found.kvs), default=0)

    async def put(self, key: str, value: bytes, *, lease: int = 0) -> int:
        """Write a key; returns the revision."""
        done = await self._call(lambda client: client.put(key.encode(), value, lease=lease or None))
        return done.header.revision

    async def delete(self, key: str) -> None:
        """Remove a key if it is there."""
        await self._call(lambda client: client.delete(key.encode()))

    async def txn(self, compares: Sequence[Compare], operations: Sequence[Put | Delete]) -> TxnResult:
        """Apply all operations if all compares hold, else none, in one revision."""
        request = rpc.TxnRequest(
            compare=[_compare(compare) for compare in compares],
            success=[_operation(operation) for operation in operations],
        )
        done = await self._call(lambda client: client.kvstub.Txn(request))
        return TxnResult(bool(done.succeeded), int(done.header.revision))

    async def grant_lease(self, ttl_s: int) -> int:
        """A new lease; returns its id."""
        return int((await self._call(lambda client: client.lease(ttl_s))).id)

    async def refresh_lease(self, lease: int) -> int:
        """Renew a lease; returns the seconds it has again, 0 when it no longer exists."""
        reply = await self._call(lambda client: client.refresh_lease(lease))
        if reply is None:
            raise Unreachable("etcd ended the renewal of a lease without an answer.", hint="It is asked again.")
        return int(reply.TTL)

    async def revoke_lease(self, lease: int) -> None:
        """End a lease, if it still is one, and remove its keys."""
        try:
            await self._call(lambda client: client.revoke_lease(lease))
        except NotFound:
            pass  # it expired meanwhile, which is what was wanted

    async def watch(self, prefix: str, start_revision: int) -> Watch:
        """Everything that happens below the prefix from a revision on."""
        client = await self._connected()
        return Watch(rpc.WatchStub(client.channel), prefix, start_revision)

    async def status(self) -> str:
        """The server's version."""
        return str((await self._call(lambda client: client.status())).version)

    async def close(self) -> None:
        """Close the connection."""
        client, self._client = self._client, None
        if client is not None:
            await _close(client)

    async def _call(self, call: Callable[[Any], Awaitable[Answer]]) -> Answer:
        client = await self._connected()
        try:
            async with asyncio.timeout(self.timeout_s):
                return await call(client)
        except asyncio.CancelledError:
            # When another call gives up on the shared connection, gRPC cancels this one. That must not look like the
            # cancellation of the caller's task, or a hiccup of etcd would end whole loops.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise self._unreachable("the connection was given up") from None
        except (aetcd.exceptions.ClientError, TimeoutError, OSError, rpc.AioRpcError) as error:
            refusal = _refusal(error)
            if refusal is not None:
                raise refusal from error
            await self._drop(client)
            raise self._unreachable(type(error).__name__) from error

    def _unreachable(self, reason: str) -> Unreachable:
        return Unreachable(
            f"etcd at {', '.join(self.endpoints)} does not answer ({reason}).",
            hint="Membership is frozen until it does; what runs goes on.",
        )

    async def _connected(self) -> Any:
        if self._client is None:
            host, _, port = self.endpoints[self._next % len(self.endpoints)].rpartition(":")
            # No timeout of gRPC's: it counts with the wall clock, which may be stepped. `_call` bounds every call.
            self._client = aetcd.Client(host=host, port=int(port), options=_CHANNEL_OPTIONS)
            await self._client.connect()
        return self._client

    async def _drop(self, client: aetcd.Client) -> None:
        """Leave this endpoint, so that the next call tries another with a fresh connection."""
        if self._client is client:
            self._client = None
            self._next += 1
            await _close(client)


async def _close(client: aetcd.Client) -> None:
    try:
        async with asyncio.timeout(1.0):
            await client.close()
    except Exception:  # noqa: S110  a connection that cannot even be closed is simply left
        pass


def _refusal(error: Exception) -> WhimbrelError | None:
    """The error that an answer of etcd stands for; None when it gave none."""
    answer = error if isinstance(error, rpc.AioRpcError) else error.__cause__ or error.__context__
    if not isinstance(answer, rpc.AioRpcError):
        return None
    details = answer.details() or ""
    if "lease not found" in details:
        return NotFound("The lease is gone from etcd.", hint="A new one is taken.")
    if "space exceeded" in details:
        return Unreachable(
            "etcd takes no writes: its database is full.",
            hint="Compact and defragment it, then `etcdctl alarm disarm`; see its --quota-backend-bytes.",
        )
    if answer.code() in _REFUSALS or "larger than max" in details:
        return WhimbrelError(f"etcd refuses: {details}", hint="This is a defect, or etcd is set up in another way.")
    return None


def retry_pause_s(attempt: int) -> float:
    """How long to wait after so many failures in a row: longer each time, and not all callers at the same moment."""
    return ETCD_RETRY_S[min(attempt, len(ETCD_RETRY_S) - 1)] * random.uniform(0.75, 1.25)  # noqa: S311  no secret


def _key_value(item: Any) -> KeyValue:
    return KeyValue(
        key=item.key.decode(),
        value=bytes(item.value),
        create_revision=int(item.create_revision),
        mod_revision=int(item.mod_revision),
        lease=int(item.lease),
    )


def _change(event: Any) -> Change:
    key, revision = event.kv.key.decode(), int(event.kv.mod_revision)
    return Change(key, revision, None if event.type == rpc.Event.DELETE else _key_value(event.kv))


def _compare(compare: Compare) -> Any:
    message = rpc.Compare(key=compare.key.encode(), result=rpc.Compare.EQUAL)
    if compare.field == "value":
        message.target = rpc.Compare.VALUE
        message.value = compare.value
    elif compare.field == "create":
        message.target = rpc.Compare.CREATE
        message.create_revision = compare.value
    elif compare.field == "lease":
        message.target = rpc.Compare.LEASE
        message.lease = compare.value
    else:
        message.target = rpc.Compare.MOD
        message.mod_revision = compare.value
    return message


def _operation(operation: Put | Delete) -> Any:
    if isinstance(operation, Put):
        put = rpc.PutRequest(key=operation.key.encode(), value=operation.value, lease=operation.lease)
        return rpc.RequestOp(request_put=put)
    return rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=operation.key.encode()))
