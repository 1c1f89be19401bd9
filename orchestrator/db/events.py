"""The event log: one line of history each, numbered in the order in which readers see them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from sqlalchemy import delete, func, select

from orchestrator.db.session import Database
from orchestrator.db.tables import Event
from whimbrel.clock import Clock, SystemClock
from whimbrel.limits import EVENTS_KEPT, PAGE_MAX

_APPEND_LOCK: Final = 0x65_76_65_6E
"""PostgreSQL's advisory lock of whoever appends events."""


class EventLog:
    """Rows of `events`. Readers follow by id, so that the events of other controllers reach them too."""

    def __init__(self, database: Database, clock: Clock | None = None) -> None:
        self._database = database
        self._clock = clock or SystemClock()

    async def append(
        self,
        kind: str,
        message: str,
        *,
        subject: str = "",
        run_id: str | None = None,
        severity: str = "info",
        data: dict[str, Any] | None = None,
        at: datetime | None = None,
        leader: int | None = None,
    ) -> Event:
        """Add one event (severity info, warning or error)."""
        row = {"kind": kind, "message": message, "subject": subject, "run_id": run_id, "severity": severity}
        return (await self.append_many([{**row, "data": data or {}, "at": at}], leader=leader))[0]

    async def append_many(self, events: Sequence[Mapping[str, Any]], *, leader: int | None = None) -> list[Event]:
        """Add several events in one transaction; the keys are `append`'s arguments."""
        now = self._clock.wall()
        rows = [Event(**{**event, "at": event.get("at") or now}) for event in events]
        async with self._database.write(leader) as session:
            if not self._database.is_sqlite:  # ids must become visible in order, or readers by id would skip some
                await session.execute(select(func.pg_advisory_xact_lock(_APPEND_LOCK)))
            session.add_all(rows)
        return rows

    async def after(self, last_id: int, *, run_id: str | None = None, limit: int = PAGE_MAX) -> list[Event]:
        """Events above `last_id`, ascending."""
        query = select(Event).where(Event.id > last_id).order_by(Event.id).limit(limit)
        if run_id is not None:
            query = query.where(Event.run_id == run_id)
        async with self._database.read() as session:
            return list((await session.execute(query)).scalars())

    async def latest(self, *, run_id: str | None = None, limit: int = PAGE_MAX) -> list[Event]:
        """The newest events, descending."""
        query = select(Event).order_by(Event.id.desc()).limit(limit)
        if run_id is not None:
            query = query.where(Event.run_id == run_id)
        async with self._database.read() as session:
            return list((await session.execute(query)).scalars())

    async def last_id(self) -> int:
        """Id of the newest event; 0 when there is none."""
        async with self._database.read() as session:
            return (await session.execute(select(func.max(Event.id)))).scalar_one() or 0

    async def prune(self, keep: int = EVENTS_KEPT) -> int:
        """Delete all but the newest `keep` events; returns how many went."""
        newest = select(Event.id).order_by(Event.id.desc()).offset(keep).limit(1)
        async with self._database.write() as session:
            edge = (await session.execute(newest)).scalar_one_or_none()
            if edge is None:
                return 0
            return (await session.execute(delete(Event).where(Event.id <= edge))).rowcount  # pyright: ignore[reportAttributeAccessIssue]
