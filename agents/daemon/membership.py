"""This node's registration in etcd: claimed once, then kept by a thread of its own, through outages of any length."""

from __future__ import annotations

import asyncio

import msgspec

from agents.daemon.config import AgentConfig
from whimbrel import limits, wire
from whimbrel.coordination import Etcd, LeaseKeeper, keys
from whimbrel.errors import Conflict, Corrupt, Unreachable, WhimbrelError
from whimbrel.limits import REGISTER_ATTEMPT_S
from whimbrel.log import get_logger
from whimbrel.transport import call_async
from whimbrel.wire.cluster import NodeRecord
from whimbrel.wire.node import ProbeReply

log = get_logger("agent")


class Membership:
    """Announces the node and keeps it announced."""

    def __init__(self, config: AgentConfig, record: NodeRecord) -> None:
        self._config = config
        self._record = record
        self._keeper: LeaseKeeper | None = None

    @property
    def registered(self) -> bool:
        """Whether this agent has ever been announced: before that it must not start anything under the name."""
        return self._keeper is not None

    def valid(self) -> bool:
        """Whether the node's lease certainly stands now."""
        return self._keeper is not None and self._keeper.valid()

    async def register(self) -> None:
        """Announce the node; waits for etcd as long as it takes.

        Raises:
            Conflict: another agent that is alive bears this name.
        """
        attempt = 0
        while True:
            try:
                await self._refuse_a_living_namesake()
                keeper = LeaseKeeper(
                    self._config.etcd_endpoints,
                    keys.node(self._record.node_id),
                    wire.encode_json(self._record),
                    limits.NODE_LEASE_TTL_S,
                )
                await asyncio.to_thread(keeper.start, REGISTER_ATTEMPT_S)
            except Unreachable as error:
                if attempt == 0:
                    log.warning("etcd does not answer; the node registers when it does", error=error.message)
                await asyncio.sleep(limits.ETCD_RETRY_S[min(attempt, len(limits.ETCD_RETRY_S) - 1)])
                attempt += 1
            else:
                self._keeper = keeper
                log.info("node registered", node=self._record.node_id, address=self._record.address)
                return

    def set_draining(self, draining: bool) -> None:
        """Say whether the node takes new workers; written only when it changes."""
        if draining != self._record.draining:
            self._record = msgspec.structs.replace(self._record, draining=draining)
            if self._keeper is not None:
                self._keeper.update(wire.encode_json(self._record))

    async def close(self, *, revoke: bool) -> None:
        """Stop keeping the lease; `revoke` takes the node's key away at once."""
        if self._keeper is not None:
            await asyncio.to_thread(lambda keeper: keeper.close(revoke=revoke), self._keeper)

    async def _refuse_a_living_namesake(self) -> None:
        """A key of our name may be our own, left by an agent that was killed: then nobody answers at its address."""
        etcd = Etcd(self._config.etcd_endpoints)
        try:
            found = await etcd.get(keys.node(self._record.node_id))
        finally:
            await etcd.close()
        if found is None:
            return
        try:
            other = wire.decode_json(found.value, NodeRecord)
            if other.incarnation == self._record.incarnation:
                return
            answer = await call_async(other.address, self._config.cluster_token, "probe", b"", limits.PROBE_TIMEOUT_S)
            reply = wire.decode_message(answer, ProbeReply)
        except (WhimbrelError, Corrupt, OSError, TimeoutError):
            return  # no answer, or none of an agent: the name is free
        if reply.node_id == self._record.node_id and reply.incarnation != self._record.incarnation:
            raise Conflict(
                f"Another agent called {reply.node_id} is alive at {other.address}.",
                hint="Node names are unique in a cluster: choose another with --node.",
            )
