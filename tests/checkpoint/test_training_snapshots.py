"""Snapshots of the training state: bit-exact, verified, and the same for every sharding."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checkpoint.log_world import LAYOUT, RUN, Trainer, reader_of, training_state
from whimbrel.checkpoint import ArrayShard, StepRecord, WeightLog, combine_digests, training_digest, whole_arrays
from whimbrel.checkpoint.manifest import encode_record
from whimbrel.delta import add_digests
from whimbrel.errors import Conflict, Corrupt, DigestMismatch, UsageError


@pytest.fixture
def trainer() -> Trainer:
    world = Trainer()
    world.start()
    world.steps(2)
    return world


def cut(shard: ArrayShard, bounds: list[int]) -> list[ArrayShard]:
    ends = [0, *sorted(min(b, shard.values.size) for b in bounds), shard.values.size]
    return [ArrayShard(shard.key, shard.shape, a, shard.values[a:b]) for a, b in itertools.pairwise(ends)]


@given(st.integers(0, 1000), st.lists(st.integers(0, 150), max_size=4), st.randoms())
@settings(max_examples=40, deadline=None)
def test_the_training_digest_does_not_depend_on_order_or_sharding(seed: int, bounds: list[int], order) -> None:
    whole = training_state(seed)
    shards = [part for shard in whole for part in cut(shard, bounds)]
    order.shuffle(shards)
    ranks = [shards[::2], shards[1::2]]
    assert add_digests(training_digest(rank) for rank in ranks) == training_digest(whole)


def test_the_training_digest_sees_key_dtype_position_and_every_bit() -> None:
    values = np.array([1.0, 2.0, 0.0, 2.0], np.float32)
    variants = [
        {"a": values},
        {"b": values},
        {"a": values.astype(np.float64)},
        {"a": values[::-1].copy()},
        {"a": np.array([1.0, 2.0, -0.0, 2.0], np.float32)},
        {"a": values, "b": np.zeros(1, np.float32)},
    ]
    assert len({training_digest(whole_arrays(each)) for each in variants}) == len(variants)


def test_a_snapshot_comes_back_bit_for_bit_from_any_number_of_ranks(trainer: Trainer) -> None:
    state = {
        "master": np.array([[np.nan, -0.0, np.inf], [1, 2, 3]], np.float32),
        "bf16": np.arange(7, dtype=np.uint16),
        "empty": np.zeros((0, 3), np.float32),
        "step": np.array(5),
        "strided": np.arange(20, dtype=np.float64)[::2],
    }
    whole = whole_arrays(state)
    sharded = [part for shard in whole for part in cut(shard, [2, 4])]
    digests = [
        trainer.log.publish_snapshot(
            *trainer.links[-1], [trainer.log.write_snapshot(rank) for rank in ranks], {"rng": b"\0"}
        )
        for ranks in ([whole], [sharded[1::3], sharded[::3], sharded[2::3]])
    ]
    for digest in digests:
        snapshot = reader_of(trainer.store).snapshot(digest)
        assert snapshot.meta == {"rng": b"\0"}
        assert snapshot.manifest.training_digest == combine_digests([training_digest(whole)])
        for key, array in state.items():
            assert (snapshot.arrays[key].shape, snapshot.arrays[key].dtype) == (array.shape, array.dtype)
            assert snapshot.arrays[key].tobytes() == array.tobytes()


def test_a_snapshot_that_is_not_complete_is_refused(trainer: Trainer) -> None:
    parts = cut(training_state(1)[0], [50, 90])
    for incomplete in (parts[:2], parts[1:], [parts[0], parts[2]], [*parts, parts[1]]):
        with pytest.raises(UsageError, match="not complete"):
            trainer.log.publish_snapshot(*trainer.links[-1], [trainer.log.write_snapshot(incomplete)], {})


def test_a_state_that_is_not_the_step_records_is_refused(trainer: Trainer) -> None:
    log = trainer.log
    delta = log.write_delta(LAYOUT, trainer.base, trainer.base)
    right, wrong = training_state(1), training_state(2)
    step = StepRecord(step=2, training_digest=combine_digests([training_digest(right)]))
    link = log.publish_delta(LAYOUT, trainer.links[-1][1], trainer.head, [delta.part], step)
    log.publish_snapshot(*link, [log.write_snapshot(right)], {})
    with pytest.raises(Conflict, match="recorded"):
        log.publish_snapshot(*link, [log.write_snapshot(wrong)], {})


def test_a_corrupt_snapshot_is_detected(trainer: Trainer) -> None:
    digest = trainer.snapshot()
    manifest = reader_of(trainer.store).snapshot_manifest(digest)
    lies = [
        ({"training_digest": "0" * 16}, DigestMismatch),
        ({"parts": manifest.parts[1:]}, DigestMismatch),
        ({"parts": [msgspec.structs.replace(manifest.parts[0], start=1), *manifest.parts[1:]]}, Corrupt),
        ({"parts": [msgspec.structs.replace(manifest.parts[0], dtype="|O8"), *manifest.parts[1:]]}, Corrupt),
        ({"parts": [msgspec.structs.replace(manifest.parts[0], shape=(2**40,)), *manifest.parts[1:]]}, Corrupt),
        ({"run_id": "run_other"}, Conflict),
    ]
    for changes, error in lies:
        lie, data = encode_record(msgspec.structs.replace(manifest, **changes))
        trainer.store.put(lie, data)
        with pytest.raises(error):
            reader_of(trainer.store).snapshot(lie)


def test_the_next_delta_names_the_newest_snapshot(trainer: Trainer) -> None:
    first = trainer.snapshot()
    trainer.step()
    assert (trainer.links[-1][1].snapshot, trainer.links[-1][1].snapshot_version) == (first, 2)
    second = trainer.snapshot()
    reader = reader_of(trainer.store)
    assert reader.newest_snapshot(trainer.store, trainer.head) == second, "a side record newer than the head's own"
    assert reader.newest_snapshot(trainer.store, trainer.links[2][0]) == first
    successor = WeightLog(trainer.store, RUN, 2)
    delta = successor.write_delta(LAYOUT, trainer.base, trainer.base)
    record = StepRecord(step=3)
    link = successor.publish_delta(LAYOUT, trainer.links[-1][1], trainer.head, [delta.part], record, snapshot=second)
    assert link[1].snapshot == second


def test_law_1_a_snapshot_of_a_version_that_was_not_committed_is_not_used(trainer: Trainer) -> None:
    kept = trainer.snapshot()
    delta = trainer.log.write_delta(LAYOUT, trainer.base, trainer.base)
    stray = trainer.log.publish_delta(
        LAYOUT, trainer.links[-1][1], trainer.head, [delta.part], StepRecord(step=2, cursor=999)
    )
    trainer.log.publish_snapshot(*stray, [trainer.log.write_snapshot(training_state(9))], {})
    trainer.log = WeightLog(trainer.store, RUN, 2)
    trainer.step()
    assert reader_of(trainer.store).newest_snapshot(trainer.store, trainer.head) == kept


def test_arrays_whose_bytes_are_not_the_same_everywhere_are_refused() -> None:
    for array in (np.array(["x"]), np.array([None]), np.zeros(2, ">f4"), np.zeros(2, np.complex128)):
        with pytest.raises(UsageError, match="dtype"):
            training_digest(whole_arrays({"a": array}))
