"""The staleness bound, kept by reservation: no token is trained on after its time, and no work is thrown away for age.

A step that trains from version `s` has places for `groups_per_step` prompt groups. A group whose oldest token is of
version `v` may be trained on up to step `v + max_versions`, its *deadline*. A lease is granted only when, for every
deadline, the groups that must be trained on by then fit into the places that are left until then; a batch is formed only
when the groups that it leaves out still fit behind it. That is the condition under which jobs of one unit all meet their
deadlines when the earliest deadline goes first (Jackson, 1955), so a group that was begun is always in time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class Bound:
    """What one run allows."""

    groups_per_step: int
    max_versions: int
    max_steps: int

    def deadline(self, min_version: int) -> int:
        """The last step that may train on a group whose oldest token is of `min_version`."""
        return min_version + self.max_versions

    def issuable(self, version: int) -> int:
        """Groups that may exist, all told and without dropped ones, while generating with `version`."""
        return min(version + 1 + self.max_versions, self.max_steps) * self.groups_per_step


@dataclass(frozen=True, slots=True)
class Places:
    """Places in batches that no group has yet."""

    groups_per_step: int
    next_step: int
    """The first step without a batch; it and all later ones are empty."""
    holes: Mapping[int, int] = field(default_factory=dict[int, int])
    """Places that became free in formed batches, by step: groups whose payload was lost."""

    def until(self, step: int) -> int:
        """Free places in the batches up to and including that of `step`."""
        fresh = max(0, step - self.next_step + 1) * self.groups_per_step
        return fresh + sum(count for hole, count in self.holes.items() if hole <= step)

    def overrun(self, demand: Mapping[int, int]) -> int | None:
        """The smallest deadline by which more groups than places are due, or None when all fit.

        Args:
            demand: Number of groups by deadline.
        """
        due = 0
        for deadline in sorted(demand):
            due += demand[deadline]
            if demand[deadline] and due > self.until(deadline):
                return deadline
        return None

    def fits(self, demand: Mapping[int, int], deadline: int) -> bool:
        """Whether one more group with `deadline` can be trained on in time, and all others still."""
        return self.overrun({**demand, deadline: demand.get(deadline, 0) + 1}) is None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A group with a deadline that is in no batch."""

    group_id: str
    index: int
    deadline: int
    state: Literal["pooled", "leased", "buffered"]
    """Pooled ones have a deadline only while they keep the tokens of an unfinished attempt."""
    max_version: int = -1
    """Buffered: of its newest token."""

    @property
    def order(self) -> tuple[int, int]:
        return self.deadline, self.index


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """What to do about the batch of a step."""

    groups: tuple[str, ...] = ()
    """In training order; empty when it cannot be formed yet."""
    strip: tuple[str, ...] = ()
    """Groups whose tokens would come too late: they lose them and keep their place in the pool."""
    reason: str = ""
    """Why it cannot be formed yet."""


def plan_batch(candidates: Sequence[Candidate], *, step: int, needed: int, behind: Places) -> BatchPlan:
    """Choose `needed` groups for the batch of `step`, or say what it waits for.

    Args:
        candidates: All groups of the run with a deadline that are in no batch.
        behind: The places that are left when the batch of `step` is full.
    """
    # Steps that the ledger did not see (it was restored from a copy) may have overtaken groups: never train on those.
    first_open = min([step, *(hole for hole, count in behind.holes.items() if count)])
    strip = [one.group_id for one in candidates if one.deadline < first_open]
    live = [one for one in candidates if one.deadline >= first_open]
    fit = [one for one in live if one.state == "buffered" and one.max_version <= step <= one.deadline]
    ready = sorted(fit, key=_order)
    if len(ready) < needed:
        leased = sum(one.state == "leased" for one in live)
        return BatchPlan(
            strip=tuple(strip),
            reason=f"Step {step} needs {needed} groups; {len(ready)} are finished and {leased} in work.",
        )
    chosen = tuple(one.group_id for one in ready[:needed])
    rest = [one for one in live if one.group_id not in set(chosen)]
    while (overrun := behind.overrun(Counter(one.deadline for one in rest))) is not None:
        due = [one for one in rest if one.deadline <= overrun]
        waiting = [one for one in due if one.state == "leased"]
        # Prefixes are cheap to lose. Work is worth waiting for, and its lease bounds the wait.
        losable = [one for one in due if one.state == "pooled"] or ([] if waiting else due)
        if not losable:
            return BatchPlan(
                strip=tuple(strip),
                reason=f"Step {step} waits for {len(waiting)} groups in work that are due by step {overrun}.",
            )
        late = max(losable, key=_order)
        strip.append(late.group_id)
        rest.remove(late)
    return BatchPlan(groups=chosen, strip=tuple(strip))


def _order(candidate: Candidate) -> tuple[int, int]:
    return candidate.order
