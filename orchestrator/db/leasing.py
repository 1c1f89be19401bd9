"""Giving out prompt groups, inside the ledger's transaction."""

from __future__ import annotations

from collections import Counter
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from orchestrator.core.staleness import Bound, Places
from orchestrator.db import groups
from orchestrator.db.runs import FINAL_STATES
from orchestrator.db.tables import PromptGroup, Run
from whimbrel.limits import GROUP_LEASE_S, LEASE_GROUPS_MAX
from whimbrel.wire.work import GroupLease, LeaseReply, LeaseRequest

LEASE: Final = timedelta(seconds=GROUP_LEASE_S)


def group_id_of(run_id: str, index: int) -> str:
    """The id of the prompt group at this index: the same in any database, so that the log can be read back into one."""
    return f"{run_id}-{index}"


def index_of(group_id: str) -> int:
    """The index in a group's id."""
    return int(group_id.rpartition("-")[2])


async def lease(session: AsyncSession, run: Run, request: LeaseRequest, now: datetime) -> LeaseReply:
    """Lease up to `capacity` groups to the caller: from the pool by deadline and index, then new ones."""
    caller, bound = request.caller, groups.bound(run)
    for group in await groups.leased_by(session, run.id, caller.worker, caller.epoch):
        groups.give_back(group, bound, f"{caller.worker} was started anew", now)
    await session.flush()
    if run.state in FINAL_STATES or run.desired_state != "running":
        standing = run.state if run.state in FINAL_STATES else run.desired_state
        return LeaseReply(groups=[], reason=f"The run is {standing}.", retry_after_s=1.0)
    version = min(request.policy_version, run.head_version)
    if version < 0:
        return LeaseReply(groups=[], reason="No version is committed yet.")
    capacity = max(0, min(request.capacity, LEASE_GROUPS_MAX))
    places, due = await groups.places(session, run), await groups.demand(session, run.id)
    pool = await _pool(session, run.id, capacity)
    taken = [group for group in pool if _take_from_pool(group, bound, version, places, due)]
    reason = ""
    if len(taken) < capacity:
        created, reason = await _create(session, run, bound, version, places, due, capacity - len(taken), now)
        taken += created
    for group in taken:
        group.state, group.attempt, group.reason = "leased", group.attempt + 1, ""
        group.worker, group.worker_epoch = caller.worker, caller.epoch
        group.lease_deadline, group.updated_at = now + LEASE, now
    return LeaseReply(groups=[_lease_of(group) for group in taken], reason=reason)


def _take_from_pool(group: PromptGroup, bound: Bound, version: int, places: Places, due: Counter[int]) -> bool:
    """Set the deadline that the group gets with the next lease, if there is a place for it; keep `due` true."""
    before = group.consume_by
    if before is not None:
        due[before] -= 1
        deadline = min(before, bound.deadline(version))
        if places.fits(due, deadline):
            due[deadline] += 1
            group.consume_by = deadline
            return True
    deadline = bound.deadline(version)
    if places.fits(due, deadline):
        groups.forget_partial(group)  # its old tokens would come too late, new ones will not
        due[deadline] += 1
        group.consume_by = deadline
        return True
    if before is not None:
        due[before] += 1
    return False


async def _create(
    session: AsyncSession,
    run: Run,
    bound: Bound,
    version: int,
    places: Places,
    due: Counter[int],
    wanted: int,
    now: datetime,
) -> tuple[list[PromptGroup], str]:
    """New groups, and why there are not more."""
    dropped = select(func.count()).where(PromptGroup.run_id == run.id, PromptGroup.state == "dropped")
    alive = run.next_index - (await session.execute(dropped)).scalar_one()
    allowed, deadline = bound.issuable(version), bound.deadline(version)
    created: list[PromptGroup] = []
    while len(created) < wanted:
        if alive + len(created) >= allowed:
            return created, _full(run, bound, version)
        if not places.fits(due, deadline):
            return (
                created,
                f"The batches up to step {deadline} are spoken for; a newer version than {version} gets work.",
            )
        due[deadline] += 1
        index = run.next_index
        run.next_index += 1
        group = new_group(run.id, index, now)
        group.consume_by = deadline
        session.add(group)
        created.append(group)
    return created, ""


def new_group(run_id: str, index: int, now: datetime) -> PromptGroup:
    """A group that nobody has worked on."""
    return PromptGroup(
        id=group_id_of(run_id, index),
        run_id=run_id,
        index=index,
        state="pooled",
        attempt=0,
        partial="",
        payload="",
        consumed_count=0,
        created_at=now,
        updated_at=now,
    )


def _full(run: Run, bound: Bound, version: int) -> str:
    if version + 1 + bound.max_versions >= bound.max_steps:
        return f"All prompt groups of the run's {bound.max_steps} steps are given out."
    return (
        f"Staleness bound: work for step {bound.deadline(version)} is given out, "
        f"and version {version} may be at most {bound.max_versions} behind the trainer."
    )


async def _pool(session: AsyncSession, run_id: str, limit: int) -> list[PromptGroup]:
    query = select(PromptGroup).where(PromptGroup.run_id == run_id, PromptGroup.state == "pooled")
    query = query.order_by(PromptGroup.consume_by.is_(None), PromptGroup.consume_by, PromptGroup.index).limit(limit)
    return list((await session.execute(query)).scalars())


def _lease_of(group: PromptGroup) -> GroupLease:
    assert group.consume_by is not None
    return GroupLease(
        group_id=group.id,
        index=group.index,
        attempt=group.attempt,
        lease_s=GROUP_LEASE_S,
        partial=group.partial,
        consume_by=group.consume_by,
    )
