"""Fetches chunks from whoever has them, over several connections at once, and verifies each.

A connection that breaks in the middle of a chunk is opened again and the transfer goes on at the byte it had reached, at
the same source or at another. A chunk whose bytes do not match its digest is fetched again from another source. Only
complete, verified chunks leave this module.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from whimbrel.delta import content_digest
from whimbrel.errors import Corrupt, LimitReached, MissingChunk, Unauthorized, Unreachable, WhimbrelError
from whimbrel.limits import (
    CHUNK_MAX_BYTES,
    IO_TIMEOUT_S,
    SHUN_S,
    TRANSFER_DEADLINE_S,
    TRANSFER_RETRIES,
    TRANSFER_RETRY_PAUSE_S,
    TRANSFER_STREAMS,
)
from whimbrel.transport.connection import Broken, Connection
from whimbrel.transport.frames import Call, Get, Put, Reply, Request, Size


class ChunkClient:
    """A client for many servers. Thread-safe."""

    def __init__(
        self,
        token: str,
        *,
        streams: int = TRANSFER_STREAMS,
        on_corrupt: Callable[[str, str], None] | None = None,
    ) -> None:
        """`on_corrupt` is called with the digest and the source of a chunk that arrived with other bytes."""
        self.bytes_received = 0
        self.retries = 0
        """Sources that failed and were passed over or asked again."""
        self.resumed = 0
        """Transfers that went on at the byte they had reached."""
        self.repaired = 0
        """Chunks that arrived corrupt and then well."""
        self._token = token
        self._streams = streams
        self._on_corrupt = on_corrupt
        self._pool = ThreadPoolExecutor(max_workers=streams, thread_name_prefix="chunks")
        self._idle: dict[str, list[Connection]] = {}
        self._shunned: dict[str, float] = {}
        self._closed = False
        self._lock = threading.Lock()

    def fetch(self, digests: Sequence[str], sources: Sequence[str]) -> dict[str, bytes]:
        """Fetch chunks from sources given as host:port, best first.

        Raises:
            MissingChunk: no source holds one of them.
            Corrupt: every source that holds one of them has wrong bytes.
            Unauthorized: the token is not the cluster's.
            Unreachable: no source could be reached, or all failed within the attempts and the time there are.
        """
        wanted = list(dict.fromkeys(digests))
        futures = [self._pool.submit(self._fetch_one, digest, list(sources)) for digest in wanted]
        try:
            return {digest: future.result() for digest, future in zip(wanted, futures, strict=True)}
        finally:
            for future in futures:
                future.cancel()

    def put(self, address: str, data: bytes, *, lasting: bool = True) -> str:
        """Store a chunk at a server; returns its digest once it is durable there.

        What need not be `lasting` goes where older chunks of that kind make room for newer ones.

        Raises:
            LimitReached: it is larger than a chunk may be. StorageFull: the server has no room.
            Unreachable: no answer; sending it again is safe.
        """
        if len(data) > CHUNK_MAX_BYTES:
            raise LimitReached(f"A chunk of {len(data)} bytes is over {CHUNK_MAX_BYTES}.", hint="Split it.")
        digest = content_digest(data)
        self._ask(address, Put(digest, len(data), lasting), data)
        return digest

    def size(self, address: str, digest: str) -> int | None:
        """The chunk's size at a server, None when it is not there."""
        size = self._ask(address, Size(digest)).size
        return None if size < 0 else size

    def call(self, address: str, name: str, payload: bytes = b"", timeout_s: float = 5.0) -> bytes:
        """Ask the process behind a server something. Raises as `call_async` does."""
        return self._ask(address, Call(name, payload), timeout_s=timeout_s).payload

    def close(self) -> None:
        """Close all connections."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, {}
        for connections in idle.values():
            for connection in connections:
                connection.close()

    # -- one chunk -----------------------------------------------------------------------------------------------------
    def _fetch_one(self, digest: str, sources: list[str]) -> bytes:
        failure: WhimbrelError = MissingChunk(f"No source for chunk {digest} is known.", hint="Is any node up?")
        transfer = _Transfer(digest)
        deadline = time.monotonic() + TRANSFER_DEADLINE_S
        missing: set[str] = set()
        strangers: set[str] = set()
        corrupt = 0
        for attempt in range(TRANSFER_RETRIES):
            if attempt:
                time.sleep(TRANSFER_RETRY_PAUSE_S * attempt)
            for source in self._best_first(sources):
                if time.monotonic() > deadline:
                    break
                try:
                    data = self._fetch_from(source, transfer, deadline)
                except MissingChunk:
                    missing.add(source)  # no failure as long as another source may have it
                except Unauthorized as error:
                    strangers.add(source)
                    failure = error
                except Corrupt as error:
                    corrupt += 1
                    if self._on_corrupt is not None:
                        self._on_corrupt(digest, source)
                    failure = error
                except WhimbrelError as error:
                    self._count(retries=1)
                    self._shunned[source] = time.monotonic() + SHUN_S
                    failure = error
                else:
                    self._count(repaired=min(corrupt, 1))
                    return data
            if missing >= set(sources):
                raise MissingChunk(
                    f"Chunk {digest} is held by none of {len(sources)} sources.", hint="A node that has it may be away."
                )
            if missing | strangers >= set(sources):
                break
        if isinstance(failure, MissingChunk | Corrupt | Unauthorized | Unreachable):
            raise failure
        raise Unreachable(f"No source gives chunk {digest}: {failure.message}", hint=failure.hint) from failure

    def _best_first(self, sources: list[str]) -> list[str]:
        now = time.monotonic()
        return sorted(sources, key=lambda source: self._shunned.get(source, 0.0) > now)

    def _fetch_from(self, source: str, transfer: _Transfer, deadline: float) -> bytes:
        """The chunk from one source, resumed after breaks as long as each attempt brings it further."""
        got = transfer.got
        while True:
            before = len(got)
            if before:
                self._count(resumed=1)
            try:
                self._receive(source, transfer)
            except Broken as error:
                if len(got) > before and time.monotonic() < deadline:
                    continue
                raise Unreachable(f"{source} broke off: {error}.", hint="Another source is tried.") from error
            if content_digest(got) == transfer.digest:
                return bytes(got)
            shared = transfer.origins != {source}
            transfer.restart()
            # Bytes from several sources do not tell which one was wrong: this one is asked for all of them.
            if not shared:
                raise Corrupt(f"{source} sent other bytes than chunk {transfer.digest}.", hint="Another one is asked.")

    def _receive(self, source: str, transfer: _Transfer) -> None:
        """Receive what is still wanting of the chunk. Raises Broken, or the error of a refusal."""
        got = transfer.got
        connection, reply = self._exchange(source, Get(transfer.digest, len(got)))
        before = len(got)
        try:
            if reply.size < before:
                # It holds less than others sent: one of them is wrong, and the digest decides.
                transfer.restart()
                raise Broken("it holds fewer bytes than were received from another source")
            if reply.size > CHUNK_MAX_BYTES or reply.nbytes != reply.size - before:
                raise Corrupt(f"{source} announces {reply.size} bytes for chunk {transfer.digest}.")
            transfer.origins.add(source)
            try:
                connection.read_into(got, reply.nbytes)
            finally:
                self._count(bytes_received=len(got) - before)
        except BaseException:
            connection.close()
            raise
        self._give_back(source, connection)

    # -- connections ---------------------------------------------------------------------------------------------------
    def _ask(self, address: str, request: Request, data: bytes = b"", *, timeout_s: float = IO_TIMEOUT_S) -> Reply:
        try:
            connection, reply = self._exchange(address, request, data, timeout_s=timeout_s)
        except Broken as error:
            raise Unreachable(f"{address} broke off: {error}.", hint="Is that node up?") from error
        self._give_back(address, connection)
        return reply

    def _exchange(
        self, address: str, request: Request, data: bytes = b"", *, timeout_s: float = IO_TIMEOUT_S
    ) -> tuple[Connection, Reply]:
        """Ask, on a connection that is then the caller's. Raises Broken, or the error of a refusal."""
        connection = self._connect(address, timeout_s)
        while True:
            try:
                return connection, connection.ask(request, data, timeout_s=timeout_s)
            except Broken as error:
                connection.close()
                if error.timed_out or not connection.pooled:
                    raise
                # Its server closed it while it was idle, or was restarted: then the others are dead as well.
                self._close_idle(address)
                connection = self._connect(address, timeout_s)
            except Corrupt:
                # Said by the server, or what came was no reply: in doubt the connection is of no use.
                connection.close()
                raise
            except WhimbrelError:
                self._give_back(address, connection)
                raise
            except BaseException:
                connection.close()
                raise

    def _connect(self, address: str, timeout_s: float) -> Connection:
        with self._lock:
            idle = self._idle.get(address)
            if idle:
                return idle.pop()
        return Connection(address, self._token, timeout_s=timeout_s)

    def _give_back(self, address: str, connection: Connection) -> None:
        connection.pooled = True
        with self._lock:
            idle = self._idle.setdefault(address, [])
            if not self._closed and len(idle) < self._streams:
                idle.append(connection)
                return
        connection.close()

    def _close_idle(self, address: str) -> None:
        with self._lock:
            idle = self._idle.pop(address, [])
        for connection in idle:
            connection.close()

    def _count(self, **amounts: int) -> None:
        with self._lock:
            for name, amount in amounts.items():
                setattr(self, name, getattr(self, name) + amount)


class _Transfer:
    """What has arrived of one chunk, and from whom."""

    def __init__(self, digest: str) -> None:
        self.digest = digest
        self.got = bytearray()
        self.origins: set[str] = set()

    def restart(self) -> None:
        """Forget what has arrived."""
        self.got.clear()
        self.origins.clear()
