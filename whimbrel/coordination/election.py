"""Which controller leads: a key created if absent, under a lease; its create_revision is the leader's epoch.

A leader compares that revision in every transaction it writes, so a deposed one cannot write even while it still
believes in itself. A new controller on the same host takes over at once when the old holder's process is provably gone;
otherwise it waits for the lease to expire.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

from whimbrel import wire
from whimbrel.coordination import keys
from whimbrel.coordination.etcd import Compare, Delete, Etcd
from whimbrel.coordination.lease import LeaseKeeper
from whimbrel.errors import Corrupt, Fenced
from whimbrel.limits import ETCD_CALL_TIMEOUT_S, LEADER_LEASE_TTL_S
from whimbrel.wire.cluster import Leader


class Election:
    """One candidate. `holder` is `host:pid:nonce`, unique for each process."""

    def __init__(self, endpoints: Sequence[str], holder: str, url: str) -> None:
        self.holder = holder
        self.epoch = 0
        self._endpoints = list(endpoints)
        self._record = Leader(holder=holder, url=url)
        self._etcd = Etcd(endpoints)
        self._keeper: LeaseKeeper | None = None

    def is_leader(self) -> bool:
        """Whether this process certainly leads now, by its own monotonic clock."""
        # A keeper that lost its lease and won the key again holds it under a new revision: that is a new term, which
        # begins with the next campaign_once().
        return self._keeper is not None and self._keeper.valid() and self._keeper.revision == self.epoch

    async def current(self) -> Leader | None:
        """Who leads according to etcd."""
        found = await self._etcd.get(keys.LEADER)
        return None if found is None else wire.decode_json(found.value, Leader)

    async def campaign_once(self) -> bool:
        """Try to become leader; returns whether this process leads.

        Raises:
            Unreachable: etcd does not answer.
        """
        if self._keeper is not None:
            if self._keeper.valid():
                self.epoch = self._keeper.revision
                return True
            await self._drop()
        if not await self._is_free():
            return False
        # The guard makes each put a create: after the lease was lost another may have led, so that is a new term.
        keeper = LeaseKeeper(
            self._endpoints,
            keys.LEADER,
            wire.encode_json(self._record),
            LEADER_LEASE_TTL_S,
            guard=Compare(keys.LEADER, "create", 0),
        )
        try:
            await asyncio.to_thread(keeper.start, 2 * ETCD_CALL_TIMEOUT_S)
        except Fenced:
            return False
        self._keeper = keeper
        self.epoch = keeper.revision
        return True

    async def resign(self) -> None:
        """Give leadership up at once."""
        if self._keeper is not None:
            keeper, self._keeper = self._keeper, None
            await asyncio.to_thread(keeper.close)

    async def close(self) -> None:
        """Resign and close the connection."""
        await self.resign()
        await self._etcd.close()

    async def _drop(self) -> None:
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            await asyncio.to_thread(keeper.close, revoke=False)

    async def _is_free(self) -> bool:
        """Whether nobody leads; the key of a holder that is provably gone is removed first."""
        found = await self._etcd.get(keys.LEADER)
        if found is None:
            return True
        try:
            holder = wire.decode_json(found.value, Leader).holder
        except Corrupt:
            return False  # a record of another release; its lease runs out like any other
        if holder != self.holder and not _is_dead_here(holder):
            return False
        return (
            await self._etcd.txn([Compare(keys.LEADER, "mod", found.mod_revision)], [Delete(keys.LEADER)])
        ).succeeded


def _is_dead_here(holder: str) -> bool:
    """Whether the holder ran on this host and its process is gone. Only that is proof; anything else is waited for."""
    host, pid, *_ = [*holder.split(":"), "", ""]
    if host != os.uname().nodename or not pid.isdigit():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False
