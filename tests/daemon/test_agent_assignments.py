"""The pure part: what runs here follows the owners' keys, from any picture, in any order."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from hypothesis import given, settings
from hypothesis import strategies as st

from agents.daemon.assignments import Hold, Local, Owned, Owners, SpecFacts, Start, Stop, decide
from whimbrel.wire.cluster import Ownership

RUN = "run_06a00000000000000000000000"
SPECS = {RUN: SpecFacts(trainer_ranks=2, spec_json="{}")}
NAMES = st.sampled_from(["trainer", "rollout-0", "rollout-1"])
HERE = "n1"
OwnerState = Literal["running", "stopped"]


def owned(worker: str, epoch: int, node: str = HERE, state: OwnerState = "running") -> Owned:
    role = "trainer" if worker == "trainer" else "rollout"
    return Owned(Ownership(run_id=RUN, worker=worker, role=role, node_id=node, state=state, start=1), epoch)


def owners(*entries: Owned, revision: int = 1000) -> Owners:
    return Owners({(entry.ownership.run_id, entry.ownership.worker): entry for entry in entries}, revision)


@st.composite
def pictures(draw: st.DrawFn) -> tuple[Owners, list[Local]]:
    names = draw(st.lists(NAMES, unique=True))
    entries = [
        owned(
            name,
            draw(st.integers(1, 9)),
            draw(st.sampled_from([HERE, "n2"])),
            draw(st.sampled_from(["running", "stopped"])),
        )
        for name in names
    ]
    local = draw(
        st.lists(
            st.builds(
                Local,
                run_id=st.just(RUN),
                worker=NAMES,
                epoch=st.integers(1, 9),
                state=st.sampled_from(["running", "stopping", "exited"]),
                killing=st.booleans(),
            ),
            max_size=6,
            unique_by=lambda entry: (entry.worker, entry.epoch),
        )
    )
    return owners(*entries, revision=draw(st.sampled_from([5, 1000]))), local


def apply(local: list[Local], actions: list[Start | Stop | Hold]) -> list[Local]:
    """A world in which every stop succeeds in the end and every start works."""
    after = {(entry.worker, entry.epoch): entry for entry in local}
    for action in actions:
        match action:
            case Start():
                assert (action.worker, action.epoch) not in after
                after[action.worker, action.epoch] = Local(RUN, action.worker, action.epoch, "running")
            case Stop():
                after[action.worker, action.epoch] = replace(after[action.worker, action.epoch], state="exited")
            case Hold():
                pass
    return [replace(e, state="exited") if e.state == "stopping" else e for e in after.values()]


@given(pictures())
@settings(max_examples=300, deadline=None)
def test_it_converges_and_then_asks_for_nothing(picture: tuple[Owners, list[Local]]) -> None:
    seen, local = picture
    for _ in range(3):
        local = apply(local, decide(HERE, seen, SPECS, local))
    assert not [a for a in decide(HERE, seen, SPECS, local) if not isinstance(a, Hold)]
    trusted = [e for e in local if e.state == "running" and e.epoch <= seen.revision]
    for entry in trusted:
        current = seen.entries.get((RUN, entry.worker))
        if current is not None and current.epoch >= entry.epoch:
            assert (current.epoch, current.ownership.node_id) == (entry.epoch, HERE)
            assert current.ownership.state == "running"


@given(pictures())
@settings(max_examples=300, deadline=None)
def test_an_epoch_never_starts_twice_nor_beside_an_older_one(picture: tuple[Owners, list[Local]]) -> None:
    seen, local = picture
    for action in decide(HERE, seen, SPECS, local):
        if isinstance(action, Start):
            of_worker = [entry for entry in local if entry.worker == action.worker]
            assert all(entry.state == "exited" and entry.epoch != action.epoch for entry in of_worker)
            current = seen.entries[RUN, action.worker]
            assert (current.ownership.node_id, current.ownership.state) == (HERE, "running")


@given(pictures(), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_the_same_picture_gives_the_same_plan(picture: tuple[Owners, list[Local]], random: object) -> None:
    seen, local = picture
    shuffled = list(local)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert decide(HERE, seen, SPECS, local) == decide(HERE, seen, SPECS, shuffled)


def test_a_store_that_went_back_in_time_stops_nothing() -> None:
    local = [Local(RUN, "trainer", 500, "running")]
    assert [type(a) for a in decide(HERE, owners(revision=3), SPECS, local)] == [Hold]
    older = owners(owned("trainer", 40), revision=41)
    assert all(isinstance(a, Hold) for a in decide(HERE, older, SPECS, local))


def test_a_replaced_epoch_is_killed_and_a_stopped_one_is_asked() -> None:
    local = [Local(RUN, "rollout-0", 7, "running")]
    (stop,) = decide(HERE, owners(owned("rollout-0", 9)), SPECS, local)
    assert isinstance(stop, Stop)
    assert not stop.polite
    (stop,) = decide(HERE, owners(owned("rollout-0", 9, node="n2")), SPECS, local)
    assert isinstance(stop, Stop)
    assert not stop.polite
    (stop,) = decide(HERE, owners(owned("rollout-0", 9, state="stopped")), SPECS, local)
    assert isinstance(stop, Stop)
    assert stop.polite


def test_a_polite_stop_becomes_a_kill_when_the_epoch_is_replaced_meanwhile() -> None:
    stopping = Local(RUN, "rollout-0", 7, "stopping")
    (stop,) = decide(HERE, owners(owned("rollout-0", 9)), SPECS, [stopping])
    assert isinstance(stop, Stop)
    assert not stop.polite
    assert decide(HERE, owners(owned("rollout-0", 9)), SPECS, [replace(stopping, killing=True)]) == []


def test_without_a_spec_it_waits_and_says_so() -> None:
    (hold,) = decide(HERE, owners(owned("trainer", 7)), {}, [])
    assert isinstance(hold, Hold)
    assert "spec" in hold.reason


def test_a_trainer_starts_with_its_ranks_and_a_rollout_alone() -> None:
    plan = decide(HERE, owners(owned("trainer", 7), owned("rollout-0", 8)), SPECS, [])
    assert {(a.worker, a.ranks) for a in plan if isinstance(a, Start)} == {("trainer", 2), ("rollout-0", 1)}
