"""The staleness bound, kept by reservation: no token is trained on after its time, and no work is thrown away for age.

A step that trains from version `s` has place for `groups_per_step` prompt groups. A group whose oldest token is of version
`v` may be trained on up to step `v + max_versions`, its *deadline*. A lease is granted only when, for every deadline, the
groups that must be trained on by then fit into the steps that are left until then; a batch is formed only when the groups
that it leaves out still fit behind it. Both together are the classic condition under which taking the earliest deadline
first meets all deadlines (Liu and Layland, 1973, for tasks of one unit), so a group that was begun is always in time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


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
        """Groups that may have been issued and not dropped, all told, when generating with `version`."""
        return min(version + 1 + self.max_versions, self.max_steps) * self.groups_per_step

    def fits(self, deadlines: Iterable[int], next_step: int) -> bool:
        """Whether all groups with these deadlines can be trained on in time, beginning with `next_step`."""
        return self.first_overrun(deadlines, next_step) is None

    def first_overrun(self, deadlines: Iterable[int], next_step: int) -> int | None:
        """The smallest deadline by which there are more groups than places, or None when all fit."""
        for count, deadline in enumerate(sorted(deadlines), start=1):
            if count > (deadline - next_step + 1) * self.groups_per_step:
                return deadline
        return None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A group that is not yet in a batch, with a deadline."""

    group_id: str
    index: int
    deadline: int
    state: str
    """pooled (with a partial prefix), leased or buffered."""
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
    """Pooled groups whose partial prefix would come too late: they lose it and keep their place."""
    reason: str = ""
    """Why it cannot be formed yet."""


def plan_batch(bound: Bound, candidates: Sequence[Candidate], step: int) -> BatchPlan:
    """Choose the groups of the batch of `step`, which no batch has been formed for, or say what it waits for."""
    buffered = sorted(
        (one for one in candidates if one.state == "buffered" and one.max_version <= step), key=lambda one: one.order
    )
    leased = sum(one.state == "leased" for one in candidates)
    if len(buffered) < bound.groups_per_step:
        return BatchPlan(
            reason=f"Step {step} needs {bound.groups_per_step} groups; {len(buffered)} are finished, {leased} in work."
        )
    chosen = buffered[: bound.groups_per_step]
    taken = {one.group_id for one in chosen}
    rest = [one for one in candidates if one.group_id not in taken]
    strip: list[str] = []
    while (overrun := bound.first_overrun([one.deadline for one in rest], step + 1)) is not None:
        # A prefix is tokens only; what is in work or finished is worth waiting for, and its lease bounds the wait.
        prefixes = [one for one in rest if one.state == "pooled" and one.deadline <= overrun]
        if not prefixes:
            waiting = sum(one.state == "leased" and one.deadline <= overrun for one in rest)
            return BatchPlan(
                reason=f"Step {step} waits for one of {waiting} groups in work that must be trained on by step {overrun}."
            )
        late = min(prefixes, key=lambda one: one.order)
        strip.append(late.group_id)
        rest.remove(late)
    return BatchPlan(groups=tuple(one.group_id for one in chosen), strip=tuple(strip))
