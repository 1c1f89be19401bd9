"""The reservation arithmetic alone, over thousands of schedules: whatever was begun is trained on in time."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.staleness import Bound, Candidate, Places, plan_batch

CALLS = ("lease", "lease", "lease", "finish", "finish", "lose", "batch", "batch", "commit", "commit")


class Schedule:
    """The ledger's use of the arithmetic, without a database."""

    def __init__(self, groups_per_step: int, max_versions: int) -> None:
        self.bound = Bound(groups_per_step, max_versions, max_steps=1000)
        self.head = self.next_step = self.issued = 0
        self.groups: dict[str, Candidate] = {}

    def places(self) -> Places:
        return Places(self.bound.groups_per_step, self.next_step)

    def due(self) -> Counter[int]:
        return Counter(group.deadline for group in self.groups.values())

    def lease(self, lag: int) -> None:
        version = max(0, self.head - lag)
        pooled = sorted((one for one in self.groups.values() if one.state == "pooled"), key=lambda one: one.order)
        for group in pooled:  # with the tokens of an earlier attempt: they keep their deadline
            self.groups[group.group_id] = replace(group, state="leased", max_version=version)
            return
        deadline = self.bound.deadline(version)
        if self.issued < self.bound.issuable(version) and self.places().fits(self.due(), deadline):
            name = f"g{self.issued}"
            self.groups[name] = Candidate(name, self.issued, deadline, "leased", version)
            self.issued += 1

    def move(self, pick: int, state: str) -> None:
        leased = [one for one in self.groups.values() if one.state == "leased"]
        if leased:
            group = leased[pick % len(leased)]
            self.groups[group.group_id] = replace(group, state=state)

    def batch(self) -> bool:
        step = self.next_step
        if step > self.head + 1:
            return False
        behind = Places(self.bound.groups_per_step, step + 1)
        candidates = list(self.groups.values())
        plan = plan_batch(candidates, step=step, needed=self.bound.groups_per_step, behind=behind)
        for group_id in plan.strip:
            assert self.groups.pop(group_id).state == "pooled", "finished or running work was thrown away"
            self.issued -= 1  # without tokens it is a group like any new one
        for group_id in plan.groups:
            group = self.groups.pop(group_id)
            assert group.max_version <= step <= group.deadline, "trained on outside the bound"
        self.next_step += bool(plan.groups)
        assert self.places().overrun(self.due()) is None, "something that was begun can no longer be in time"
        return bool(plan.groups)

    def commit(self) -> None:
        self.head += self.head < self.next_step


@settings(max_examples=250, deadline=None)
@given(st.integers(1, 3), st.integers(0, 4), st.integers(0, 2**32))
def test_whatever_was_begun_is_in_time_and_the_next_step_is_reached(groups: int, staleness: int, seed: int):
    schedule, random = Schedule(groups, staleness), Random(seed)
    for _ in range(200):
        match random.choice(CALLS):
            case "lease":
                schedule.lease(random.choice((0, 0, 1, 2, 5)))
            case "finish":
                schedule.move(random.randrange(9), "buffered")
            case "lose":
                schedule.move(random.randrange(9), "pooled")
            case "batch":
                schedule.batch()
            case "commit":
                schedule.commit()
    for _ in range(3):  # nothing fails any more: the next steps come
        step = schedule.next_step
        while schedule.head < schedule.next_step:
            schedule.commit()
        for number in range(20 * groups):
            schedule.lease(0)
            schedule.move(number, "buffered")
        assert schedule.batch(), f"step {step} never gets its batch"


def test_places_count_holes_of_formed_batches():
    places = Places(2, next_step=5, holes={4: 1})
    assert places.until(3) == 0
    assert places.until(4) == 1
    assert places.until(5) == 3
    assert places.fits({4: 0}, 4)
    assert not places.fits({4: 1}, 4)
    assert places.overrun({4: 1, 5: 3}) == 5


def test_work_overtaken_by_steps_the_ledger_did_not_see_is_never_trained_on():
    old, new = Candidate("a", 0, 3, "buffered", 1), Candidate("b", 1, 9, "buffered", 4)
    plan = plan_batch([old, new], step=5, needed=1, behind=Places(1, 6))
    assert (plan.groups, plan.strip) == (("b",), ("a",))


def test_a_hole_in_an_earlier_batch_is_kept_for_the_group_that_is_due_then():
    due, later = Candidate("a", 0, 4, "buffered", 4), Candidate("b", 1, 6, "buffered", 4)
    plan = plan_batch([due, later], step=5, needed=1, behind=Places(1, 6, holes={4: 1}))
    assert (plan.groups, plan.strip) == (("b",), ())
