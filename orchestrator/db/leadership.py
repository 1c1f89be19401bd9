"""Fencing of the control loop's writes: one row holds the epoch of the newest leader that wrote here."""

from __future__ import annotations

from datetime import datetime
from typing import Final

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from orchestrator.db.tables import Leadership
from whimbrel.errors import Fenced

_ROW: Final = 1


async def fenced(session: AsyncSession, epoch: int) -> None:
    """Check inside a transaction that no newer leader than `epoch` wrote here, and keep it so until its end.

    Raises:
        Fenced: the row names a newer epoch, or there is none because `take` was never called.
    """
    row = await _locked(session, shared=True)
    if row is None or row.epoch > epoch:
        newest = row.epoch if row else 0
        raise Fenced(
            f"Leadership epoch {epoch} is no longer in charge: epoch {newest} is.",
            hint="Another controller leads; this one must stop writing.",
            epoch=epoch,
            newest=newest,
        )


async def take(session: AsyncSession, epoch: int, holder: str, now: datetime) -> None:
    """Record a new leader. The same epoch again changes nothing.

    Raises:
        Fenced: a newer epoch is recorded.
    """
    row = await _locked(session, shared=False)
    if row is None:
        session.add(Leadership(id=_ROW, epoch=epoch, holder=holder, since=now))
        return
    if row.epoch > epoch:
        raise Fenced(f"Leadership epoch {epoch} comes late: epoch {row.epoch} ({row.holder}) leads.", newest=row.epoch)
    if row.epoch < epoch:
        row.epoch, row.holder, row.since = epoch, holder, now


async def _locked(session: AsyncSession, *, shared: bool) -> Leadership | None:
    # A shared lock: fenced writes of one leader do not wait for each other, a new leader waits for all of them.
    query = select(Leadership).where(Leadership.id == _ROW).with_for_update(read=shared)
    return (await session.execute(query)).scalar_one_or_none()
