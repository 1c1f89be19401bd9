"""The event log: one line of history each, numbered, with fan-out to readers in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any, Final

from sqlalchemy import delete, func, select

from orchestrator.db.session import Database
from orchestrator.db.tables import Event
from whimbrel.clock import Clock, SystemClock
from whimbrel.errors import Unreachable
from whimbrel.limits import EVENTS_KEPT, LOOP_MAX_PERIOD_S, PAGE_MAX, SSE_QUEUE

_APPEND_LOCK: Final = 0x65_76_65_6E
"""PostgreSQL's advisory lock of whoever appends events."""


class Subscription:
    """Events for one reader, in order of their ids, each once."""

    def __init__(self, run_id: str | None) -> None:
        self._run_id = run_id
        self._queue: asyncio.Queue[Event] = asyncio.Queue(SSE_QUEUE)
        self.lost = False
        """The reader was too slow and missed events: it must resume by id from the database."""

    async def get(self, timeout_s: float) -> Event | None:
        """The next event, or None when there is none within `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._queue.get()
        except TimeoutError:
            return None

    def put(self, event: Event) -> None:
        if self._run_id is not None and event.run_id != self._run_id:
            return
        try:
            self._queue.put_nowait(event)
        except asyncio.QueueFull:
            self.lost = True


class EventLog:
    """Rows of `events`. All readers in the process are fed by one poller, so that events of other controllers arrive too."""

    def __init__(self, database: Database, clock: Clock | None = None) -> None:
        self._database = database
        self._clock = clock or SystemClock()
        self._subscriptions: set[Subscription] = set()
        self._delivered: int | None = None
        """Id of the last event given to the subscriptions; None before the first poll."""
        self._delivering = asyncio.Lock()

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
        """Add one event (severity info, warning or error) and wake its readers."""
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
        if self._subscriptions:
            await self.poll()
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

    @asynccontextmanager
    async def subscribe(self, run_id: str | None = None) -> AsyncGenerator[Subscription, None]:
        """New events from now on, of one run or of all. To resume, subscribe first, then read `after`, then skip doubles."""
        subscription = Subscription(run_id)
        if not self._subscriptions:
            self._delivered = None
        await self.poll()
        self._subscriptions.add(subscription)
        try:
            yield subscription
        finally:
            self._subscriptions.discard(subscription)

    async def poll(self) -> None:
        """Give the subscriptions what came into the database since the last time."""
        async with self._delivering:
            if self._delivered is None:
                self._delivered = await self.last_id()
            while events := await self.after(self._delivered):
                for event in events:
                    for subscription in self._subscriptions:
                        subscription.put(event)
                self._delivered = events[-1].id

    async def poll_forever(self, every_s: float = LOOP_MAX_PERIOD_S) -> None:
        """Poll until cancelled; a database that is away is asked again."""
        while True:
            try:
                if self._subscriptions:
                    await self.poll()
                else:
                    self._delivered = None  # nobody listens: the next subscriber starts at the end
            except Unreachable:  # the readers learn it from what they ask; the poller only waits
                pass
            await asyncio.sleep(every_s)

    async def prune(self, keep: int = EVENTS_KEPT) -> int:
        """Delete all but the newest `keep` events; returns how many went."""
        newest = select(Event.id).order_by(Event.id.desc()).offset(keep).limit(1)
        async with self._database.write() as session:
            edge = (await session.execute(newest)).scalar_one_or_none()
            if edge is None:
                return 0
            return (await session.execute(delete(Event).where(Event.id <= edge))).rowcount  # pyright: ignore[reportAttributeAccessIssue]
