"""How prompt groups change state: the small steps that the ledger's transactions are made of.

    pooled ──lease──► leased ──report──► buffered ──batch──► batched ──commit──► consumed
      ▲                 │                   │                  │
      └──── expiry, reassignment, failure, lost payload ◄──────┘        (anything not consumed) ──► dropped

All run inside a transaction that holds the lock of the run's row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from datetime import datetime

from sqlalchemy import delete, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from orchestrator.core.staleness import Bound, Candidate, Places
from orchestrator.db.tables import Batch, PromptGroup, Run, Trajectory, Worker
from whimbrel.errors import Fenced
from whimbrel.limits import GROUP_ATTEMPTS
from whimbrel.wire.work import Caller

UNBATCHED = ("pooled", "leased", "buffered")


async def check_caller(session: AsyncSession, caller: Caller) -> None:
    """Refuse a caller whose worker was replaced; remember the newest epoch that was heard.

    Raises:
        Fenced: a newer epoch of this worker is known.
    """
    worker = await session.get(Worker, (caller.run_id, caller.worker), with_for_update=True)
    if worker is None:
        return  # the control loop has not written it down yet; it cannot have been replaced
    if worker.epoch > caller.epoch:
        raise Fenced(
            f"Epoch {caller.epoch} of {caller.worker} in {caller.run_id} was replaced by epoch {worker.epoch}.",
            hint="This process must stop; its successor goes on.",
            epoch=caller.epoch,
            newest=worker.epoch,
        )
    worker.epoch = caller.epoch


def bound(run: Run) -> Bound:
    """The run's staleness bound."""
    return Bound(run.groups_per_step, run.max_versions, run.max_steps)


async def places(session: AsyncSession, run: Run) -> Places:
    """Places in batches that no group has yet."""
    committed = max(0, run.mirrored_version)
    # Asked at each lease and report: the steps behind the mirrored version, all of the run's past, must not be read for it.
    query = select(Batch.step, Batch.group_ids).where(
        Batch.run_id == run.id, Batch.step >= committed, Batch.committed.is_(False)
    )
    formed = {step: len(group_ids) for step, group_ids in (await session.execute(query)).all()}
    holes = {step: run.groups_per_step - count for step, count in formed.items() if count < run.groups_per_step}
    return Places(run.groups_per_step, max([committed, *(step + 1 for step in formed)]), holes)


async def demand(session: AsyncSession, run_id: str) -> Counter[int]:
    """Groups in no batch, by deadline; those without a token have none."""
    query = (
        select(PromptGroup.consume_by, func.count())
        .where(PromptGroup.run_id == run_id, PromptGroup.state.in_(UNBATCHED), PromptGroup.consume_by.is_not(None))
        .group_by(PromptGroup.consume_by)
    )
    rows = (await session.execute(query)).all()
    return Counter({deadline: count for deadline, count in rows if deadline is not None})


async def candidates(session: AsyncSession, run_id: str) -> list[PromptGroup]:
    """Groups in no batch that have a deadline."""
    query = select(PromptGroup).where(
        PromptGroup.run_id == run_id, PromptGroup.state.in_(UNBATCHED), PromptGroup.consume_by.is_not(None)
    )
    return list((await session.execute(query)).scalars())


def candidate(group: PromptGroup) -> Candidate:
    """The group as the planner sees it."""
    assert group.consume_by is not None
    assert group.state in UNBATCHED
    return Candidate(group.id, group.index, group.consume_by, group.state, group.max_version)


async def named(session: AsyncSession, run_id: str, group_ids: Iterable[str]) -> dict[str, PromptGroup]:
    """The groups with these ids that exist in the run."""
    query = select(PromptGroup).where(PromptGroup.run_id == run_id, PromptGroup.id.in_(list(group_ids)))
    return {group.id: group for group in (await session.execute(query)).scalars()}


async def leased_by(session: AsyncSession, run_id: str, worker: str, before_epoch: int) -> list[PromptGroup]:
    """Groups leased by epochs of the worker below `before_epoch`, by index."""
    query = select(PromptGroup).where(
        PromptGroup.run_id == run_id,
        PromptGroup.state == "leased",
        PromptGroup.worker == worker,
        PromptGroup.worker_epoch < before_epoch,
    )
    return list((await session.execute(query.order_by(PromptGroup.index))).scalars())


def give_back(group: PromptGroup, bound: Bound, reason: str, now: datetime) -> None:
    """End a lease without a result: to the pool with the tokens that were reported, or dropped after too many attempts.

    `worker` stays, so that a result that is only late is recognised.
    """
    assert group.state == "leased", f"{group.id} is {group.state}, not leased"
    group.lease_deadline = None
    group.reason = reason
    group.updated_at = now
    if group.attempt >= GROUP_ATTEMPTS:
        drop(group, f"poisoned: {group.attempt} attempts, the last ended with: {reason}", now)
        return
    group.state = "pooled"
    group.consume_by = bound.deadline(group.partial_min_version) if group.partial else None


async def strip(session: AsyncSession, group: PromptGroup, reason: str, now: datetime) -> None:
    """To the pool without any token: the place stays, the work is lost."""
    assert group.state not in ("consumed", "dropped"), f"{group.id} is {group.state}"
    if group.state in ("buffered", "batched"):
        await session.execute(delete(Trajectory).where(Trajectory.group_id == group.id))
    group.state = "pooled"
    group.reason = reason
    group.consume_by = group.step = group.lease_deadline = None
    forget_partial(group)
    group.payload, group.payload_bytes, group.tokens = "", 0, 0
    group.min_version = group.max_version = -1
    group.updated_at = now


def forget_partial(group: PromptGroup) -> None:
    """Drop what an unfinished attempt had reported."""
    group.partial, group.partial_tokens, group.partial_min_version = "", 0, -1


def drop(group: PromptGroup, reason: str, now: datetime) -> None:
    """Give the group up for good, with the reason."""
    assert group.state not in ("consumed", "batched"), f"{group.id} is {group.state}"
    group.state = "dropped"
    group.reason = reason
    group.consume_by = group.lease_deadline = None
    group.updated_at = now
