"""Time, behind a seam, so that decisions and tests choose what "now" is.

Two clocks that must not be mixed: `monotonic` measures durations and deadlines inside one process and
survives wall-clock steps; `wall` is for people, records and anything that crosses a process.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Protocol


class Clock(Protocol):
    """Where a component gets its time from."""

    def monotonic(self) -> float:
        """Seconds on a clock that never goes back; comparable inside one process only."""
        ...

    def wall(self) -> datetime:
        """Now, in UTC, for records."""
        ...


class SystemClock:
    """The machine's own clocks."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> datetime:
        return datetime.now(UTC)


class ManualClock:
    """A clock that moves only when told to; for tests."""

    def __init__(self, start: datetime | None = None) -> None:
        self._elapsed_s = 0.0
        self._start = start or datetime(2026, 1, 1, tzinfo=UTC)

    def monotonic(self) -> float:
        return self._elapsed_s

    def wall(self) -> datetime:
        return self._start + timedelta(seconds=self._elapsed_s)

    def advance(self, seconds: float) -> None:
        """Move both clocks forward by `seconds`."""
        if seconds < 0:
            raise ValueError("a clock does not go back")
        self._elapsed_s += seconds


def rfc3339(moment: datetime) -> str:
    """Format an aware datetime as RFC 3339 in UTC with milliseconds, e.g. 2026-01-01T00:00:00.000Z."""
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
