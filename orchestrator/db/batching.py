"""Forming the batch of a step, inside the ledger's transaction."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy.ext.asyncio import AsyncSession

from orchestrator.core.staleness import Places, plan_batch
from orchestrator.db import groups
from orchestrator.db.tables import Batch, Run
from whimbrel.errors import Conflict
from whimbrel.limits import BATCHES_AHEAD
from whimbrel.wire.work import BatchGroup, BatchReply, BatchRequest


async def batch(session: AsyncSession, run: Run, request: BatchRequest, now: datetime) -> BatchReply:
    """The stored batch of a step, without what is missing and filled up again; or a new one.

    Raises:
        Conflict: the step is committed and this database has no batch of it.
    """
    step = request.step
    stored = await session.get(Batch, (run.id, step))
    if stored is not None and stored.committed:
        return BatchReply(ready=True, groups=await _describe(session, run.id, stored.group_ids))
    if step < max(0, run.mirrored_version):
        raise Conflict(f"Step {step} of {run.name} is committed; its batch is in the log.", step=step)
    if stored is not None and request.missing:
        await _take_out(session, stored, request.missing, now)
    places = await groups.places(session, run)
    if stored is None:
        wait = _not_yet(run, step, places)
        if wait:
            return BatchReply(ready=False, reason=wait, retry_after_s=0.5)
    chosen = list(stored.group_ids) if stored else []
    needed = run.groups_per_step - len(chosen)
    if needed:
        added, reason = await _choose(session, run, step, needed, places, now)
        if not added:
            return BatchReply(ready=False, reason=reason)
        chosen += added
        if stored is None:
            stored = Batch(run_id=run.id, step=step, created_at=now, committed=False)
            session.add(stored)
        stored.group_ids, stored.epoch = chosen, request.caller.epoch
    return BatchReply(ready=True, groups=await _describe(session, run.id, chosen))


def _not_yet(run: Run, step: int, places: Places) -> str:
    """Why no batch can be formed for a step that has none, or nothing."""
    if step != places.next_step:
        return f"Step {step} is not the next one: the ledger has batches up to step {places.next_step - 1}."
    if step > max(run.head_version, 0) + BATCHES_AHEAD:
        return f"Step {step} is more than {BATCHES_AHEAD} ahead of version {run.head_version}."
    return ""


async def _choose(
    session: AsyncSession, run: Run, step: int, needed: int, places: Places, now: datetime
) -> tuple[list[str], str]:
    rows = {row.id: row for row in await groups.candidates(session, run.id)}
    holes = {hole: count for hole, count in places.holes.items() if hole != step}
    behind = Places(run.groups_per_step, max(places.next_step, step + 1), holes)
    plan = plan_batch([groups.candidate(row) for row in rows.values()], step=step, needed=needed, behind=behind)
    for group_id in plan.strip:
        await groups.strip(session, rows[group_id], f"too old for a place from step {step} on", now)
    for group_id in plan.groups:
        row = rows[group_id]
        assert row.state == "buffered"
        assert row.consume_by is not None
        assert row.max_version <= step <= row.consume_by, f"{group_id} is outside the staleness bound of step {step}"
        row.state, row.step, row.updated_at = "batched", step, now
    return list(plan.groups), plan.reason


async def _take_out(session: AsyncSession, stored: Batch, missing: Sequence[str], now: datetime) -> None:
    lost = set(missing) & set(stored.group_ids)
    for group in (await groups.named(session, stored.run_id, lost)).values():
        await groups.strip(session, group, "no source holds its payload", now)
    stored.group_ids = [group_id for group_id in stored.group_ids if group_id not in lost]
    await session.flush()


async def _describe(session: AsyncSession, run_id: str, group_ids: Sequence[str]) -> list[BatchGroup]:
    rows = await groups.named(session, run_id, group_ids)
    return [
        BatchGroup(
            group_id=row.id,
            index=row.index,
            payload=row.payload,
            payload_bytes=row.payload_bytes,
            min_version=row.min_version,
            max_version=row.max_version,
        )
        for row in (rows[group_id] for group_id in group_ids)
    ]
