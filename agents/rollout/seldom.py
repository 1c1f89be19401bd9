"""The same thing said again and again is said seldom: a chunk that is rotten at all its sources is met several times a second."""

from __future__ import annotations

import threading
from collections.abc import Callable

from whimbrel.limits import INCIDENT_REPEAT_S, INCIDENT_SUBJECTS_MAX


class Seldom:
    """Whether to tell of a subject now: at once, and then once per INCIDENT_REPEAT_S. Safe in threads."""

    def __init__(self, clock_s: Callable[[], float]) -> None:
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._told: dict[str, float] = {}

    def due(self, subject: str) -> bool:
        """True if it was not told of lately, which it is then."""
        with self._lock:
            now = self._clock_s()
            told = self._told.pop(subject, None)
            if told is not None and now - told < INCIDENT_REPEAT_S:
                self._told[subject] = told
                return False
            while len(self._told) >= INCIDENT_SUBJECTS_MAX:
                del self._told[next(iter(self._told))]
            self._told[subject] = now
            return True
