"""Keep the database's histories within their bounds, now and then, apart from the loop."""

from __future__ import annotations

from collections.abc import Collection

from orchestrator.db import EventLog, FleetRepository, RunRepository
from whimbrel.clock import Clock
from whimbrel.limits import HOUSEKEEPING_EVERY_S


class Housekeeping:
    """Prunes events and timeline spans, and settles what ended unseen."""

    def __init__(self, events: EventLog, fleet: FleetRepository, runs: RunRepository, clock: Clock) -> None:
        self._events = events
        self._fleet = fleet
        self._runs = runs
        self._clock = clock
        self._done_s: float | None = None

    async def tidy(self, epoch: int, seen: Collection[str]) -> bool:
        """Prune and settle if it is time again; whether it was. Raises Unreachable or Fenced.

        Args:
            seen: runs that the loop still looks at.
        """
        now_s = self._clock.monotonic()
        if self._done_s is not None and now_s - self._done_s < HOUSEKEEPING_EVERY_S:
            return False
        self._done_s = now_s
        await self._events.prune()
        await self._fleet.settle_ended(seen, leader=epoch)
        for run in await self._runs.active():
            await self._fleet.prune_spans(run.id)
        return True
