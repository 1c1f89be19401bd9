"""Deleting follows the chain: what a restore, a replay or a joiner needs stays."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from tests.checkpoint.log_world import LAYOUT, RUN, Trainer, first_state, holds, reader_of, restored, training_state
from whimbrel import limits
from whimbrel.checkpoint import (
    HostWeights,
    MemoryStore,
    WeightLog,
    apply_retention,
    committed_digest,
    describe,
    find_version,
    plan_retention,
    store_fetch,
    verify_chain,
)
from whimbrel.checkpoint.orphans import sweep_orphans
from whimbrel.checkpoint.retention import _named, read_holdings
from whimbrel.checkpoint.stores import chunk_name
from whimbrel.clock import ManualClock
from whimbrel.delta import content_digest
from whimbrel.errors import ChainGap, Corrupt, NotFound


@pytest.fixture
def trainer() -> Trainer:
    """Anchors and snapshots at 3, 6 and 9; head at 11."""
    world = Trainer()
    world.start()
    for _ in range(3):
        world.steps(3)
        world.anchor()
        world.snapshot()
    world.steps(2)
    return world


def test_the_newest_snapshots_and_the_chain_to_replay_from_them_stay(trainer: Trainer) -> None:
    plan = apply_retention(trainer.store, RUN, trainer.head)
    assert (plan.head_version, plan.kept_from) == (11, 6)
    described = describe(trainer.store, RUN)
    assert [manifest.version for _, manifest in described.versions] == list(range(6, 12))
    assert sorted(described.snapshots) == [6, 9]
    assert sorted(described.anchors) == [6, 9]
    reader = reader_of(trainer.store)
    for version in range(6, 12):
        assert holds(restored(trainer.store, trainer.links[version][0]), trainer.states[version])
    for digest in described.snapshots.values():
        reader.snapshot(digest)
    for _, manifest in reader.history(trainer.head, 6):
        assert manifest.step is not None
        assert all(trainer.store.size(entry.payload) for entry in manifest.step.batch), "payloads to replay from"
    assert verify_chain(trainer.store, RUN).payloads_missing == []


def test_what_is_no_longer_needed_is_gone(trainer: Trainer) -> None:
    before = len(trainer.store.list(""))
    apply_retention(trainer.store, RUN, trainer.head)
    assert len(trainer.store.list("")) < before
    for digest, manifest in trainer.links[:6]:
        assert trainer.store.size(digest) is None
        if manifest.step is not None:
            assert all(trainer.store.size(entry.payload) is None for entry in manifest.step.batch)
    with pytest.raises(ChainGap):
        restored(trainer.store, trainer.links[2][0])
    with pytest.raises((NotFound, ChainGap)):
        find_version(trainer.store, RUN, 2)


def test_nothing_goes_while_there_are_too_few_snapshots() -> None:
    world = Trainer()
    world.start()
    world.steps(5)
    world.anchor()
    world.snapshot()
    assert limits.SNAPSHOTS_KEPT == 2
    assert apply_retention(world.store, RUN, world.head).names == []


def test_attempts_that_were_never_committed_go_and_one_ahead_of_the_head_stays(trainer: Trainer) -> None:
    stray = WeightLog(trainer.store, RUN, 7)
    changed = [type(p)(p.name, 0, p.bits.copy()) for p in trainer.base]
    changed[0].bits[:50] += 3
    step = trainer.links[-1][1].step
    assert step is not None
    part = stray.write_delta(LAYOUT, trainer.base, changed).part
    behind = stray.publish_delta(LAYOUT, trainer.links[-2][1], trainer.links[-2][0], [part], step)
    part = stray.write_delta(LAYOUT, trainer.base, changed).part
    ahead = stray.publish_delta(LAYOUT, trainer.links[-1][1], trainer.head, [part], type(step)(step=11))
    apply_retention(trainer.store, RUN, trainer.head)
    assert trainer.store.size(behind[0]) is None
    assert trainer.store.size(ahead[0]) is not None
    assert all(trainer.store.size(digest) for digest in ahead[1].chunk_digests()), "chunks that both name stay"
    assert holds(restored(trainer.store, trainer.head), trainer.states[-1])


def test_planning_is_pure_and_names_chunks_before_manifests_before_records(trainer: Trainer) -> None:
    held = read_holdings(trainer.store, RUN, trainer.head)
    plan = plan_retention(held)
    assert plan == plan_retention(read_holdings(trainer.store, RUN, trainer.head))
    manifests = {f"chunks/{digest[:2]}/{digest}" for digest, _ in trainer.links}
    kinds = [
        2
        if name.startswith("runs/")
        else int(
            name in manifests or name.rpartition("/")[2] in held.attempts or name.rpartition("/")[2] in held.snapshots
        )
        for name in plan.names
    ]
    assert kinds == sorted(kinds)
    assert set(kinds) == {0, 1, 2}


def test_other_runs_in_the_store_are_not_touched(trainer: Trainer) -> None:
    other = Trainer(trainer.store, run_id="run_other")
    other.start()
    other.steps(2)
    apply_retention(trainer.store, RUN, trainer.head)
    assert holds(restored(trainer.store, other.head, "run_other"), other.states[-1])


def test_a_chain_begins_only_at_an_anchor_that_a_later_delta_names(trainer: Trainer) -> None:
    """Readers that cannot list would miss one that is named by none."""
    kept_from = apply_retention(trainer.store, RUN, trainer.head).kept_from
    named = {manifest.anchor_version for _, manifest in reader_of(trainer.store).history(trainer.head, kept_from)}
    assert kept_from in named
    held = read_holdings(trainer.store, RUN, trainer.head)
    unnamed = [(d, msgspec.structs.replace(m, anchor="", anchor_version=0)) for d, m in held.chain]
    assert plan_retention(dataclasses.replace(held, chain=unnamed)).names == []


def test_a_successor_names_what_its_predecessor_wrote_and_could_not_name(trainer: Trainer) -> None:
    anchor, snapshot = trainer.anchor(), trainer.snapshot()
    trainer.log = WeightLog(trainer.store, RUN, 5, ManualClock())
    trainer.step()
    assert (trainer.links[-1][1].anchor, trainer.links[-1][1].snapshot) == (anchor[0], snapshot)


def test_every_version_after_the_oldest_anchor_restores_without_listing(trainer: Trainer) -> None:
    apply_retention(trainer.store, RUN, trainer.head)
    for version in range(7, 12):
        host = HostWeights(RUN)
        reader_of(trainer.store).restore(host, trainer.links[version][0])
        assert holds(host, trainer.states[version])


def test_a_pinned_anchor_stays_over_many_rounds(trainer: Trainer) -> None:
    for _ in range(3):
        apply_retention(trainer.store, RUN, trainer.head, pinned={0})
        assert committed_digest(trainer.store, RUN, 0) == trainer.links[0][0]
        assert holds(restored(trainer.store, trainer.links[0][0]), trainer.states[0])
        assert describe(trainer.store, RUN).uncommitted == 0
        trainer.steps(2)
        trainer.anchor()
        trainer.snapshot()
    assert describe(trainer.store, RUN).versions[0][1].version > 6
    apply_retention(trainer.store, RUN, trainer.head)
    assert trainer.store.size(trainer.links[0][0]) is None
    with pytest.raises(NotFound):
        committed_digest(trainer.store, RUN, 0)


def test_a_damaged_plan_is_reported_and_deletes_nothing(trainer: Trainer) -> None:
    trainer.store.create(f"runs/{RUN}/retention/000000000001", b"nonsense")
    before = trainer.store.list("")
    with pytest.raises(Corrupt, match="retention plan"):
        apply_retention(trainer.store, RUN, trainer.head)
    assert trainer.store.list("") == before


def test_a_run_that_the_store_does_not_know_is_not_found() -> None:
    with pytest.raises(NotFound, match="no committed version"):
        describe(MemoryStore(), RUN)


def test_verify_reports_what_it_read_and_names_a_chunk_that_rotted(trainer: Trainer) -> None:
    report = verify_chain(trainer.store, RUN, 8)
    assert (report.version, report.anchor_version, report.deltas) == (8, 6, 2)
    assert (report.payloads, report.payloads_missing) == (2, [])
    assert report.nbytes > 0
    victim = trainer.links[8][1].chunks[0].digest
    trainer.store._objects[f"chunks/{victim[:2]}/{victim}"] = b"rot"
    with pytest.raises(Corrupt, match=victim):
        verify_chain(trainer.store, RUN, 8)
    assert verify_chain(trainer.store, RUN).version == 11, "from the anchor after it"


def test_what_an_attempt_stored_is_taken_back_but_for_what_others_name() -> None:
    store = MemoryStore()
    Trainer(store).start()
    before = set(store.list("chunks/"))
    log, other = WeightLog(store, RUN, 2), WeightLog(store, "run_other", 1)
    log.write_snapshot(training_state(6))
    assert set(store.list("chunks/")) > before
    log.discard()
    assert set(store.list("chunks/")) == before
    log.write_anchor(LAYOUT, first_state(9))
    digest, manifest = other.publish_anchor(LAYOUT, 0, [other.write_anchor(LAYOUT, first_state(9))])
    log.discard()  # the same bytes are stored once, and named by now
    HostWeights("run_other").load_anchor(digest, manifest, store_fetch(store))


def test_what_nobody_names_goes_when_it_was_found_twice_a_day_apart(trainer: Trainer) -> None:
    store, start = trainer.store, datetime(2026, 1, 1, tzinfo=UTC)
    other = WeightLog(store, "run_other", 1)
    theirs = other.publish_anchor(LAYOUT, 0, [other.write_anchor(LAYOUT, first_state(7))])[0]
    lost = [content_digest(data) for data in (b"of a killed writer", b"of a refused result")]
    store.put(lost[0], b"of a killed writer")
    named = _named(read_holdings(store, RUN, trainer.head))
    everything = set(store.list("chunks/"))
    assert sweep_orphans(store, RUN, named, start) == []
    store.put(lost[1], b"of a refused result")
    day = timedelta(seconds=limits.ORPHANS_KEPT_S)
    assert sweep_orphans(store, RUN, named, start + day - timedelta(seconds=1)) == []
    assert sweep_orphans(store, RUN, named, start + day) == [lost[0]], "the other was seen a moment ago only"
    assert sweep_orphans(store, RUN, named | {lost[1]}, start + 2 * day) == [], "it is named by now"
    assert set(store.list("chunks/")) == everything - {chunk_name(lost[0])} | {chunk_name(lost[1])}
    assert store.size(theirs) is not None
    assert verify_chain(store, RUN).payloads_missing == []
