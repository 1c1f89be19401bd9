"""The ledger: which prompt groups exist, who works on them, what came of them, and which step consumed them.

Laws kept here: every group is consumed by at most one step and is at all times pooled, leased, buffered, batched,
consumed or dropped (exactly once); writes of replaced workers are refused; no token is trained on beyond the staleness
bound. Calls may be repeated, reordered and cut off at any point. One transaction each, under the lock of the run's row.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from sqlalchemy import func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from orchestrator.db import batching, groups, leasing, mirror, reporting
from orchestrator.db.audit import Audit, audit_run
from orchestrator.db.mirror import Commit, Mirrored
from orchestrator.db.reporting import Reassigned
from orchestrator.db.runs import locked_run
from orchestrator.db.session import Database
from orchestrator.db.tables import PromptGroup, Run
from whimbrel.clock import Clock, SystemClock
from whimbrel.errors import Conflict, NotFound
from whimbrel.limits import GROUP_LEASE_S
from whimbrel.wire.work import (
    BatchReply,
    BatchRequest,
    LeaseReply,
    LeaseRequest,
    ReportReply,
    ReportRequest,
)

__all__ = ["Audit", "Commit", "Ledger", "Mirrored", "Reassigned"]

LEASE: Final = timedelta(seconds=GROUP_LEASE_S)


class Ledger:
    """Groups, trajectories and batches of all runs in one database."""

    def __init__(self, database: Database, clock: Clock | None = None) -> None:
        self._database = database
        self._clock = clock or SystemClock()

    # -- what workers ask for

    async def lease(self, request: LeaseRequest, *, head_version: int | None = None) -> LeaseReply:
        """Give a rollout groups to work on: returned ones first, then new ones, as far as the staleness bound reaches.

        Args:
            head_version: The newest committed version that the caller knows of, when the database may be behind.

        Raises:
            Fenced, NotFound
        """

        async def work(session: AsyncSession) -> LeaseReply:
            run = await locked_run(session, request.caller.run_id)
            await groups.check_caller(session, request.caller)
            _see_head(run, head_version)
            return await leasing.lease(session, run, request, self._clock.wall())

        return await self._database.transact(work)

    async def report(self, request: ReportRequest, *, head_version: int | None = None) -> ReportReply:
        """Take finished groups, progress and failures; say what became of the groups that the rollout keeps.

        Raises:
            Fenced, NotFound
        """

        async def work(session: AsyncSession) -> ReportReply:
            run = await locked_run(session, request.caller.run_id)
            await groups.check_caller(session, request.caller)
            _see_head(run, head_version)
            return await reporting.report(session, run, request, self._clock.wall())

        return await self._database.transact(work)

    async def batch(self, request: BatchRequest, *, head_version: int | None = None) -> BatchReply:
        """The batch of a step: the same for every call until the step is committed, but for groups named `missing`.

        A missing group goes back to the pool, and another one takes its place at the end of the batch.

        Raises:
            Fenced, NotFound
            Conflict: the step is committed and its batch is not in this database; it is in the log.
        """

        async def work(session: AsyncSession) -> BatchReply:
            run = await locked_run(session, request.caller.run_id)
            await groups.check_caller(session, request.caller)
            _see_head(run, head_version)
            return await batching.batch(session, run, request, self._clock.wall())

        return await self._database.transact(work)

    # -- what the control loop does

    async def mirror_commit(self, commit: Commit, *, leader: int | None = None) -> Mirrored:
        """Record a committed version, and its batch as consumed, from the log. Again: changes nothing.

        Raises:
            Conflict: an earlier version is not mirrored yet.
            Fenced, NotFound
        """

        async def work(session: AsyncSession) -> Mirrored:
            run = await locked_run(session, commit.run_id)
            return await mirror.mirror_commit(session, run, commit, self._clock.wall())

        return await self._database.transact(work, leader)

    async def expire(self, run_id: str, *, leader: int | None = None) -> list[str]:
        """Return groups whose lease ran out to the pool; their ids.

        Only the clock of the controller that serves decides. Call `extend_leases` before the first time.
        """

        async def work(session: AsyncSession) -> list[str]:
            run = await locked_run(session, run_id)
            now = self._clock.wall()
            overdue = select(PromptGroup).where(
                PromptGroup.run_id == run_id, PromptGroup.state == "leased", PromptGroup.lease_deadline < now
            )
            rows = list((await session.execute(overdue.order_by(PromptGroup.index))).scalars())
            for group in rows:
                groups.give_back(group, groups.bound(run), f"the lease of {group.worker} ran out", now)
            return [group.id for group in rows]

        return await self._database.transact(work, leader)

    async def reassign(self, run_id: str, worker: str, before_epoch: int, *, leader: int | None = None) -> Reassigned:
        """Return all groups leased by epochs of a worker below `before_epoch`, with the tokens that were reported."""

        async def work(session: AsyncSession) -> Reassigned:
            run = await locked_run(session, run_id)
            return await reporting.reassign(session, run, worker, before_epoch, self._clock.wall())

        return await self._database.transact(work, leader)

    async def extend_leases(self, *, leader: int | None = None) -> int:
        """Let every lease last GROUP_LEASE_S from now: while no controller served, nobody could renew one."""
        deadline = self._clock.wall() + LEASE
        query = update(PromptGroup).where(PromptGroup.state == "leased", PromptGroup.lease_deadline < deadline)
        async with self._database.write(leader) as session:
            result = await session.execute(query.values(lease_deadline=deadline))
            return result.rowcount  # pyright: ignore[reportAttributeAccessIssue]

    async def drop(self, group_id: str, reason: str, *, leader: int | None = None) -> None:
        """Give a group up. Raises NotFound, Conflict (it is in a batch or consumed)."""

        async def work(session: AsyncSession) -> None:
            group = await session.get(PromptGroup, group_id)
            if group is None:
                raise NotFound(f"There is no prompt group {group_id}.")
            run = await locked_run(session, group.run_id)
            await session.refresh(group)
            if group.state in ("batched", "consumed"):
                raise Conflict(f"The prompt group {group_id} is {group.state}; it cannot be dropped.")
            assert run.id == group.run_id
            if group.state != "dropped":
                await groups.strip(session, group, reason, self._clock.wall())
                groups.drop(group, reason, self._clock.wall())

        await self._database.transact(work, leader)

    # -- what people ask for

    async def counts(self, run_id: str) -> dict[str, int]:
        """Groups of a run by state."""
        query = select(PromptGroup.state, func.count()).where(PromptGroup.run_id == run_id).group_by(PromptGroup.state)
        async with self._database.read() as session:
            return dict((await session.execute(query)).all())

    async def audit(self, run_id: str) -> Audit:
        """Whether the run's counts add up and every law about them holds. Raises NotFound."""
        async with self._database.read() as session:
            return await audit_run(session, run_id)


def _see_head(run: Run, head_version: int | None) -> None:
    """Commits are seen in etcd first; the mirror follows."""
    if head_version is not None and head_version > run.head_version:
        run.head_version = head_version
