"""A rotten chunk is told of, and not ten times a second."""

from __future__ import annotations

from agents.rollout.seldom import Seldom
from whimbrel.limits import INCIDENT_REPEAT_S, INCIDENT_SUBJECTS_MAX


def test_a_subject_is_told_at_once_and_then_once_per_period() -> None:
    now_s = 0.0
    seldom = Seldom(lambda: now_s)
    assert [seldom.due("a"), seldom.due("a"), seldom.due("b")] == [True, False, True]
    now_s = INCIDENT_REPEAT_S - 1
    assert not seldom.due("a")
    now_s = INCIDENT_REPEAT_S
    assert [seldom.due("a"), seldom.due("a")] == [True, False]


def test_what_is_remembered_is_bounded() -> None:
    seldom = Seldom(lambda: 0.0)
    for number in range(INCIDENT_SUBJECTS_MAX * 2):
        assert seldom.due(str(number))
    assert len(seldom._told) == INCIDENT_SUBJECTS_MAX
