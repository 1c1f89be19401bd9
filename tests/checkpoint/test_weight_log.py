"""The log's laws: committed means durable and verified; every consumer holds the same bits; nothing is half-applied."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load

from tests.checkpoint.log_world import LAYOUT, RUN, Trainer, first_state, holds, reader_of, restored, stepped
from whimbrel.checkpoint import (
    DirectoryStore,
    HostWeights,
    LogReader,
    Manifest,
    MemoryStore,
    StepRecord,
    WeightLog,
    plan_restore,
    wants_anchor,
)
from whimbrel.checkpoint.manifest import WEIGHTS_FILE, encode_record
from whimbrel.delta import Layout, Piece, TensorSpec, encode_delta
from whimbrel.errors import ChainGap, Conflict, Corrupt, DigestMismatch, MissingChunk, UsageError


@pytest.fixture
def trainer() -> Trainer:
    world = Trainer()
    world.start()
    world.steps(4)
    return world


def chunks_of(trainer: Trainer, manifest: Manifest) -> dict[str, bytes]:
    return {digest: trainer.store.get(digest) for digest in manifest.chunk_digests()}


def snapshot_of(host: HostWeights) -> tuple:
    return host.version, host.manifest_digest, host.state_digest, {n: b.copy() for n, b in host.tensors.items()}


def same(a: tuple, b: tuple) -> bool:
    return a[:3] == b[:3] and all(np.array_equal(a[3][name], b[3][name]) for name in a[3])


def test_law_2_every_version_restores_to_the_trainers_bits(trainer: Trainer) -> None:
    for (digest, manifest), state in zip(trainer.links, trainer.states, strict=True):
        host = restored(trainer.store, digest)
        assert holds(host, state)
        assert (host.version, host.manifest_digest) == (manifest.version, digest)


def test_law_2_following_version_by_version_gives_the_same_bits_as_joining_late(trainer: Trainer) -> None:
    follower = restored(trainer.store, trainer.links[0][0])
    for digest, manifest in trainer.links[1:]:
        engine = {name: bits.copy() for name, bits in follower.tensors.items()}
        patch = follower.prepare(digest, manifest, chunks_of(trainer, manifest))
        for change in patch.changes:
            engine[change.name][change.positions] = change.bits
        follower.commit(patch)
        assert all(np.array_equal(engine[name], follower.tensors[name]) for name in engine)
    assert same(snapshot_of(follower), snapshot_of(restored(trainer.store, trainer.head)))


def test_law_2_shards_of_ranks_make_the_version_that_one_rank_makes(trainer: Trainer) -> None:
    def shards(pieces: list[Piece]) -> list[list[Piece]]:
        ranks: list[list[Piece]] = [[], [], []]
        for piece in pieces:
            cuts = [0, piece.bits.size // 3, piece.bits.size // 2, piece.bits.size]
            for rank, (a, b) in enumerate(itertools.pairwise(cuts)):
                ranks[rank].append(Piece(piece.name, a, piece.bits[a:b].copy()))
        return ranks

    log = WeightLog(MemoryStore(), RUN, 9)
    base, new = first_state(), stepped(first_state(), 100)
    digest, anchor = log.publish_anchor(LAYOUT, 0, [log.write_anchor(LAYOUT, part) for part in shards(base)[::-1]])
    assert anchor.state_digest == trainer.links[0][1].state_digest
    parts = [log.write_delta(LAYOUT, a, b).part for a, b in zip(shards(base), shards(new), strict=True)]
    link = log.publish_delta(LAYOUT, anchor, digest, parts[::-1], StepRecord(step=0))
    assert link[1].state_digest == trainer.links[1][1].state_digest
    assert holds(restored(log.store, link[0]), trainer.states[1])


def test_a_rank_that_is_missing_is_refused(trainer: Trainer) -> None:
    half = [Piece(p.name, 0, p.bits[: p.bits.size // 2]) for p in trainer.base]
    delta = trainer.log.write_delta(LAYOUT, half, half)
    with pytest.raises(UsageError, match="elements"):
        trainer.log.publish_delta(LAYOUT, trainer.links[-1][1], trainer.head, [delta.part], StepRecord(step=4))
    with pytest.raises(UsageError, match=r"do not meet|has"):
        trainer.log.publish_anchor(LAYOUT, 0, [trainer.log.write_anchor(LAYOUT, half)])


def test_law_1_a_wrong_base_is_refused_and_changes_nothing(trainer: Trainer) -> None:
    host = restored(trainer.store, trainer.links[1][0])
    before = snapshot_of(host)
    digest, manifest = trainer.links[3]
    with pytest.raises(Conflict, match="applies to"):
        host.prepare(digest, manifest, chunks_of(trainer, manifest))
    assert same(before, snapshot_of(host))


def test_law_1_a_double_apply_is_refused_and_changes_nothing(trainer: Trainer) -> None:
    host = restored(trainer.store, trainer.links[1][0])
    digest, manifest = trainer.links[2]
    patch = host.prepare(digest, manifest, chunks_of(trainer, manifest))
    host.commit(patch)
    before = snapshot_of(host)
    with pytest.raises(Conflict, match="prepared for"):
        host.commit(patch)
    with pytest.raises(Conflict, match="applies to"):
        host.prepare(digest, manifest, chunks_of(trainer, manifest))
    assert same(before, snapshot_of(host))


def test_law_1_a_base_whose_bits_rotted_is_caught_by_the_state_digest(trainer: Trainer) -> None:
    host = restored(trainer.store, trainer.links[1][0])
    digest, manifest = trainer.links[2]
    patch = host.prepare(digest, manifest, chunks_of(trainer, manifest))
    touched = patch.changes[0]
    host.tensors[touched.name][touched.positions[0]] ^= np.array(4, touched.bits.dtype)
    with pytest.raises((DigestMismatch, Corrupt)):
        host.prepare(digest, manifest, chunks_of(trainer, manifest))
    with pytest.raises(DigestMismatch):
        host.scrub()


def test_law_1_preparing_changes_nothing(trainer: Trainer) -> None:
    host = restored(trainer.store, trainer.links[1][0])
    before = snapshot_of(host)
    digest, manifest = trainer.links[2]
    host.prepare(digest, manifest, chunks_of(trainer, manifest))
    assert same(before, snapshot_of(host))


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=50, deadline=None)
def test_law_1_a_corrupt_or_missing_chunk_changes_nothing(seed: int) -> None:
    trainer = WORLD
    rng = np.random.default_rng(seed)
    host = restored(trainer.store, trainer.links[1][0])
    before = snapshot_of(host)
    digest, manifest = trainer.links[2]
    chunks = chunks_of(trainer, manifest)
    victim = sorted(chunks)[rng.integers(len(chunks))]
    if rng.integers(2):
        data = bytearray(chunks[victim])
        data[rng.integers(len(data))] ^= 1 << rng.integers(8)
        chunks[victim] = bytes(data)
    else:
        del chunks[victim]
    with pytest.raises((Corrupt, MissingChunk)):
        host.prepare(digest, manifest, chunks)
    assert same(before, snapshot_of(host))


WORLD = Trainer()
WORLD.start()
WORLD.steps(2)


def forged(manifest: Manifest, **changes: object) -> tuple[str, Manifest]:
    other = msgspec.structs.replace(manifest, **changes)
    return encode_record(other)[0], other


def test_manifests_that_lie_are_refused(trainer: Trainer) -> None:
    host = restored(trainer.store, trainer.links[1][0])
    before = snapshot_of(host)
    manifest = trainer.links[2][1]
    chunks = chunks_of(trainer, manifest)
    lies: list[tuple[dict, type[Exception]]] = [
        ({"run_id": "run_other"}, Conflict),
        ({"layout_digest": "0" * 32}, Conflict),
        ({"version": 7}, Conflict),
        ({"state_digest": "0" * 16}, DigestMismatch),
        ({"changed": manifest.changed + 1}, Corrupt),
        ({"chunks": manifest.chunks[1:]}, Corrupt),
        ({"chunks": [*manifest.chunks, manifest.chunks[0]]}, Corrupt),
        ({"kind": "anchor"}, Conflict),
    ]
    for changes, error in lies:
        with pytest.raises(error):
            host.prepare(*forged(manifest, **changes), chunks)
        assert same(before, snapshot_of(host))


def test_two_chunks_over_the_same_elements_are_corrupt(trainer: Trainer) -> None:
    """Each would be right alone; together they would be resolved against one base."""
    host = restored(trainer.store, trainer.links[1][0])
    name = "embed"
    old, new = host.tensors[name].copy(), host.tensors[name].copy()
    new[5] += 1
    once = encode_delta(host.layout, [Piece(name, 0, old)], [Piece(name, 0, new)]).chunks[0]
    twice = encode_delta(host.layout, [Piece(name, 4, old[4:9])], [Piece(name, 4, new[4:9])]).chunks[0]
    manifest = forged(trainer.links[2][1], chunks=[once.info, twice.info], changed=2)
    with pytest.raises(Corrupt, match="same elements"):
        host.prepare(*manifest, {each.info.digest: each.data for each in (once, twice)})


def test_an_interrupted_commit_leaves_a_copy_that_belongs_to_no_version(trainer: Trainer) -> None:
    host = restored(trainer.store, trainer.links[1][0])
    digest, manifest = trainer.links[2]
    patch = host.prepare(digest, manifest, chunks_of(trainer, manifest))
    host.tensors[patch.changes[-1].name].flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        host.commit(patch)
    assert host.manifest_digest == ""
    host.tensors[patch.changes[-1].name].flags.writeable = True
    with pytest.raises(Conflict):
        host.prepare(digest, manifest, chunks_of(trainer, manifest))
    reader_of(trainer.store).restore(host, trainer.head)
    assert holds(host, trainer.states[-1])


def test_an_anchor_is_an_ordinary_safetensors_file(trainer: Trainer) -> None:
    record = trainer.links[0][1].files[0]
    assert record.name == WEIGHTS_FILE
    arrays = load(b"".join(trainer.store.get(ref.digest) for ref in record.chunks))
    assert set(arrays) == {spec.name for spec in LAYOUT.tensors}
    for spec in LAYOUT.tensors:
        assert tuple(arrays[spec.name].shape) == spec.shape
        assert raw(arrays[spec.name]) == trainer.states[0][spec.name].tobytes()


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def test_auxiliary_files_come_back_and_cannot_be_paths(trainer: Trainer) -> None:
    assert reader_of(trainer.store).files(trainer.links[0][1]) == {"config.json": b'{"a":1}', "empty": b""}
    for name in ("../x", "a/b", ".hidden", WEIGHTS_FILE, ""):
        with pytest.raises(UsageError):
            trainer.log.publish_anchor(LAYOUT, 0, [trainer.log.write_anchor(LAYOUT, trainer.base)], files={name: b""})


def test_export_writes_a_model_folder_of_any_version(trainer: Trainer, tmp_path: Path) -> None:
    trainer.anchor()
    trainer.steps(2)
    for version in (2, 4, 6):
        reader_of(trainer.store).export(trainer.links[version][0], tmp_path / f"v{version}")
        arrays = load((tmp_path / f"v{version}" / WEIGHTS_FILE).read_bytes())
        assert all(raw(arrays[name]) == bits.tobytes() for name, bits in trainer.states[version].items())
        assert (tmp_path / f"v{version}" / "config.json").read_bytes() == b'{"a":1}'
    with pytest.raises(FileExistsError):
        reader_of(trainer.store).export(trainer.head, tmp_path / "v2")


# -- chains ------------------------------------------------------------------------------------------------------------


def test_a_joiner_starts_from_the_newest_anchor_and_a_follower_from_what_it_holds(trainer: Trainer) -> None:
    side = trainer.anchor()
    trainer.steps(2)
    reader = reader_of(trainer.store)
    plan = reader.plan(trainer.head)
    assert [(m.kind, m.version) for _, m in plan.steps] == [("anchor", 4), ("delta", 5), ("delta", 6)]
    assert plan.steps[0][0] == side[0] == trainer.links[-1][1].anchor
    follower = reader.plan(trainer.head, trainer.links[3][0])
    assert [(m.kind, m.version) for _, m in follower.steps] == [("delta", 4), ("delta", 5), ("delta", 6)]
    assert reader.plan(trainer.head, trainer.head).steps == ()
    assert holds(restored(trainer.store, trainer.head), trainer.states[-1])


def test_a_follower_far_behind_takes_the_anchor_when_that_is_less(trainer: Trainer) -> None:
    trainer.steps(40)
    trainer.anchor()
    trainer.steps(1)
    plan = reader_of(trainer.store).plan(trainer.head, trainer.links[0][0])
    assert [m.kind for _, m in plan.steps] == ["anchor", "delta"]
    host = restored(trainer.store, trainer.links[0][0])
    reader_of(trainer.store).restore(host, trainer.head)
    assert holds(host, trainer.states[-1])


def test_a_lost_anchor_is_replaced_by_an_older_one(trainer: Trainer) -> None:
    side, _ = trainer.anchor()
    trainer.steps(2)
    trainer.store.delete(f"chunks/{side[:2]}/{side}")
    plan = reader_of(trainer.store).plan(trainer.head)
    assert [m.version for _, m in plan.steps] == [0, 1, 2, 3, 4, 5, 6]


def test_a_gap_in_the_chain_is_named(trainer: Trainer) -> None:
    lost = trainer.links[2][0]
    trainer.store.delete(f"chunks/{lost[:2]}/{lost}")
    reader = reader_of(trainer.store)
    with pytest.raises(ChainGap, match=f"version 2 .manifest {lost}") as caught:
        reader.plan(trainer.head)
    assert caught.value.details["missing_version"] == 2
    assert len(reader_of(trainer.store).plan(trainer.head, trainer.links[3][0]).steps) == 1
    with pytest.raises(ChainGap, match="version 2"):
        reader_of(trainer.store).history(trainer.head)
    with pytest.raises(ChainGap, match="held by no source"):
        reader_of(trainer.store).plan("0" * 32)


def test_planning_is_pure_and_refuses_a_chain_that_does_not_link(trainer: Trainer) -> None:
    known = dict(trainer.links)
    assert plan_restore(trainer.head, known) == plan_restore(trainer.head, dict(reversed(known.items())))
    known[trainer.links[2][0]] = msgspec.structs.replace(trainer.links[2][1], layout_digest="0" * 32)
    with pytest.raises(Conflict, match="layout"):
        plan_restore(trainer.head, known)


def test_another_runs_manifest_is_refused(trainer: Trainer) -> None:
    with pytest.raises(Conflict, match="belongs to run"):
        reader_of(trainer.store, "run_other").plan(trainer.head)
    with pytest.raises(Conflict, match="belongs to run"):
        WeightLog(trainer.store, "run_other", 1).publish_delta(
            LAYOUT, trainer.links[-1][1], trainer.head, [], StepRecord(step=4)
        )


def test_publishing_checks_layout_and_step(trainer: Trainer) -> None:
    other = Layout.of([*LAYOUT.tensors, TensorSpec("z", "U8", (1,))])
    head, manifest = trainer.links[-1]
    with pytest.raises(Conflict, match="layout"):
        trainer.log.publish_delta(other, manifest, head, [], StepRecord(step=4))
    part = trainer.log.write_delta(LAYOUT, trainer.base, trainer.base).part
    with pytest.raises(UsageError, match="follow"):
        trainer.log.publish_delta(LAYOUT, manifest, head, [part], StepRecord(step=3))


def test_an_anchor_beside_a_delta_must_be_the_same_state(trainer: Trainer) -> None:
    part = trainer.log.write_anchor(LAYOUT, first_state())
    with pytest.raises(Conflict, match="not that of version"):
        trainer.log.publish_anchor(LAYOUT, 4, [part], beside=trainer.links[-1])
    with pytest.raises(UsageError):
        trainer.log.publish_anchor(LAYOUT, 4, [part])


def test_an_anchor_is_wanted_when_the_chain_outweighs_it(trainer: Trainer) -> None:
    assert not wants_anchor(trainer.links[0][1])
    while not wants_anchor(trainer.links[-1][1]):
        trainer.step()
        assert len(trainer.links) < 100
    chain = sum(manifest.payload_bytes for _, manifest in trainer.links[1:])
    assert trainer.links[-1][1].chain_bytes == chain > trainer.links[0][1].payload_bytes
    trainer.anchor()
    trainer.step()
    assert not wants_anchor(trainer.links[-1][1])
    assert trainer.links[-1][1].chain_bytes == trainer.links[-1][1].payload_bytes


def test_a_late_anchor_counts_the_chain_since_its_own_version(trainer: Trainer) -> None:
    beside, state = trainer.links[-1], [Piece(p.name, 0, p.bits.copy()) for p in trainer.base]
    trainer.steps(2)
    trainer.log.publish_anchor(LAYOUT, 4, [trainer.log.write_anchor(LAYOUT, state)], beside=beside)
    trainer.step()
    assert trainer.links[-1][1].anchor_version == 4
    assert trainer.links[-1][1].chain_bytes == sum(manifest.payload_bytes for _, manifest in trainer.links[5:])


def test_a_manifest_has_the_same_bytes_every_time_and_round_trips(trainer: Trainer) -> None:
    digest, manifest = trainer.links[2]
    shuffled = msgspec.structs.replace(manifest, metrics=dict(reversed({"a": 1.0, "b": 2.0}.items())))
    ordered = msgspec.structs.replace(manifest, metrics={"a": 1.0, "b": 2.0})
    assert encode_record(shuffled) == encode_record(ordered)
    assert reader_of(trainer.store).manifest(digest) == manifest
    assert encode_record(reader_of(trainer.store).manifest(digest))[0] == digest


def test_hostile_manifests_are_corrupt(trainer: Trainer) -> None:
    data = trainer.store.get(trainer.head)
    rng = np.random.default_rng(2)
    for _ in range(300):
        bad = bytearray(data)
        bad[rng.integers(len(bad))] ^= 1 << rng.integers(8)

        def fetch(digests: Sequence[str], bad: bytes = bytes(bad)) -> dict[str, bytes]:
            return dict.fromkeys(digests, bad)

        with pytest.raises(Corrupt):
            LogReader(fetch, RUN).manifest(trainer.head)


def test_the_log_lives_in_a_directory_too(tmp_path: Path) -> None:
    world = Trainer(DirectoryStore(tmp_path))
    world.start()
    world.steps(2)
    assert holds(restored(DirectoryStore(tmp_path), world.head), world.states[-1])
