"""When to write a snapshot of the full training state. Pure; the caller measures and writes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from whimbrel.limits import EXPECTED_FAILURE_EVERY_S, SNAPSHOT_VERSIONS_MAX


@dataclass
class SnapshotSchedule:
    """Counts what a restore would have to replay.

    With `auto`, a snapshot that costs C seconds is due when replaying the versions since the last one would take longer than
    sqrt(2 C M), M being the expected time between failures: the interval at which writing and expected replaying cost the
    same (Young, "A first order approximation to the optimum checkpoint interval", 1974).
    """

    every: int | Literal["auto"] = "auto"
    versions: int = 0
    """Committed since the last snapshot."""
    replay_s: float = 0.0
    """What their optimizer steps took."""
    cost_s: float = 0.0
    """What the last snapshot took."""

    def stepped(self, seconds: float) -> None:
        """A version was committed whose step took this long."""
        self.versions += 1
        self.replay_s += seconds

    def written(self, seconds: float) -> None:
        """A snapshot of the newest version was written."""
        self.versions, self.replay_s, self.cost_s = 0, 0.0, seconds

    @property
    def due(self) -> bool:
        """Whether to write one now."""
        if self.every != "auto":
            return self.versions >= self.every
        if not self.versions:
            return False
        worth_s = math.sqrt(2 * self.cost_s * EXPECTED_FAILURE_EVERY_S)
        return self.versions >= SNAPSHOT_VERSIONS_MAX or self.replay_s >= worth_s
