"""Bringing the database up to the weight log: a committed version, and the batch that its step record names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from orchestrator.db import groups, leasing
from orchestrator.db.tables import Batch, PromptGroup, Run, Trajectory, Version
from whimbrel.errors import Conflict


@dataclass(frozen=True, kw_only=True)
class Commit:
    """A committed version, as its manifest has it."""

    run_id: str
    version: int
    manifest: str
    parent: str = ""
    kind: str = "delta"
    epoch: int = 0
    groups: Sequence[tuple[str, str]] = ()
    """(group id, payload digest) of the step's batch, in training order; none for a version that no step made."""
    payload_bytes: int = 0
    full_bytes: int = 0
    changed: int = 0
    total: int = 0
    anchor: str = ""
    snapshot: str = ""
    state_digest: str = ""
    step_seconds: float | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    committed_at: datetime | None = None


@dataclass(frozen=True, kw_only=True)
class Mirrored:
    """What a commit changed in the ledger."""

    changed: bool
    consumed: int = 0
    returned: list[str] = field(default_factory=list)
    """Groups that the ledger had given to the step and the trainer did not use: available again."""
    from_log: list[str] = field(default_factory=list)
    """Groups that the ledger did not have as finished; the log is right."""
    consumed_twice: list[str] = field(default_factory=list)
    """Groups that an earlier step had consumed: a broken law, to be reported."""


async def mirror_commit(session: AsyncSession, run: Run, commit: Commit, now: datetime) -> Mirrored:
    """Record the version and consume its batch.

    Raises:
        Conflict: an earlier version is not mirrored yet.
    """
    if commit.version <= run.mirrored_version:
        return Mirrored(changed=False)
    if commit.version > run.mirrored_version + 1:
        raise Conflict(
            f"Version {commit.version} of {run.name} cannot be mirrored before version {run.mirrored_version + 1}.",
            version=commit.version,
            mirrored=run.mirrored_version,
        )
    result = Mirrored(changed=True)
    if commit.groups:
        result = await _consume(session, run, commit, now)
    session.add(_version(commit, now))
    run.mirrored_version = commit.version
    if commit.version >= run.head_version:
        run.head_version, run.head_manifest = commit.version, commit.manifest
    run.updated_at = now
    return result


async def _consume(session: AsyncSession, run: Run, commit: Commit, now: datetime) -> Mirrored:
    step, group_ids = commit.version - 1, [group_id for group_id, _ in commit.groups]
    assert len(set(group_ids)) == len(group_ids), f"step {step} of {run.id} names a group twice"
    batch = await session.get(Batch, (run.id, step))
    planned = list(batch.group_ids) if batch else []
    if batch is None:
        batch = Batch(run_id=run.id, step=step, created_at=now)
        session.add(batch)
    batch.group_ids, batch.epoch, batch.committed = group_ids, commit.epoch, True
    rows = await groups.named(session, run.id, [*group_ids, *planned])
    _learn(session, run, rows, group_ids, now)
    result = Mirrored(changed=True, consumed=len(group_ids))
    for group_id, payload in commit.groups:
        group = rows[group_id]
        if group.consumed_count and group.step != step:
            result.consumed_twice.append(group_id)
        if group.state == "batched" and group.step != step and group.step is not None:
            await _leave(session, run.id, group.step, group_id)
        if group.state not in ("buffered", "batched") or group.payload != payload:
            result.from_log.append(group_id)
            group.from_log = not await _is_complete(session, run, group_id)
            group.payload = payload
        group.state, group.step, group.consumed_count = "consumed", step, group.consumed_count + 1
        group.lease_deadline, group.consume_by, group.reason, group.updated_at = None, None, "", now
        groups.forget_partial(group)
    for group_id in planned:
        if group_id not in set(group_ids) and rows[group_id].state == "batched":
            await _make_available(session, run, rows[group_id], step, now)
            result.returned.append(group_id)
    return result


def _learn(
    session: AsyncSession, run: Run, rows: dict[str, PromptGroup], group_ids: Sequence[str], now: datetime
) -> None:
    """Add groups that this database never had to `rows`: it was restored from a copy that is older than the log.

    Indexes that were passed over exist too; nobody here knows what became of them, so they are in the pool.
    """
    unknown = {leasing.index_of(group_id) for group_id in group_ids if group_id not in rows}
    fresh = range(run.next_index, max(unknown, default=-1) + 1)
    for index in sorted(unknown.union(fresh)):
        group = leasing.new_group(run.id, index, now)
        group.from_log = index in unknown
        rows[group.id] = group
        session.add(group)
        run.next_index = max(run.next_index, index + 1)


async def _leave(session: AsyncSession, run_id: str, step: int, group_id: str) -> None:
    other = await session.get(Batch, (run_id, step))
    if other is not None and not other.committed:
        other.group_ids = [one for one in other.group_ids if one != group_id]


async def _make_available(session: AsyncSession, run: Run, group: PromptGroup, step: int, now: datetime) -> None:
    if group.consume_by is not None and group.consume_by > step:
        group.state, group.step, group.updated_at = "buffered", None, now
    else:
        await groups.strip(session, group, f"too old after step {step}", now)


async def _is_complete(session: AsyncSession, run: Run, group_id: str) -> bool:
    count = select(func.count()).select_from(Trajectory).where(Trajectory.group_id == group_id)
    return (await session.execute(count)).scalar_one() == run.group_size


def _version(commit: Commit, now: datetime) -> Version:
    return Version(
        run_id=commit.run_id,
        version=commit.version,
        manifest=commit.manifest,
        parent=commit.parent,
        kind=commit.kind,
        epoch=commit.epoch,
        payload_bytes=commit.payload_bytes,
        full_bytes=commit.full_bytes,
        changed=commit.changed,
        total=commit.total,
        anchor=commit.anchor,
        snapshot=commit.snapshot,
        state_digest=commit.state_digest,
        step_seconds=commit.step_seconds,
        metrics=commit.metrics,
        committed_at=commit.committed_at or now,
    )
