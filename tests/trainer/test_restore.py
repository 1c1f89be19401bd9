from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agents.trainer.batch import Batch
from agents.trainer.place import TickingStore
from agents.trainer.publish import Publisher
from agents.trainer.step import Stepper
from tests.trainer.stage import RUN, FakePlace, own_trainer, read_head, restore, train
from tests.trainer.support import make_spec
from whimbrel.checkpoint import DirectoryStore, HostWeights, LogReader, MemoryStore, StepRecord, WeightLog, store_fetch
from whimbrel.coordination import BlockingEtcd, EtcdServer, keys
from whimbrel.errors import Conflict, Fenced, StorageFull, Unreachable, UsageError


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agents.trainer.publish.PUBLISH_RETRY_S", (0.01,))


class Died(Exception):
    """The process ends here."""


def _place(root: Path, etcd: BlockingEtcd, model: str, **changes: object) -> FakePlace:
    return FakePlace(root, etcd, make_spec(model, **changes), own_trainer(etcd))


def _again(place: FakePlace) -> FakePlace:
    """The next start of the same trainer."""
    return FakePlace(place.home, place.etcd, place.spec, own_trainer(place.etcd))


def _end(trained: Any) -> tuple[str, str]:
    return trained.stepper.optimizer.training_digest(), trained.stepper.policy.state_digest()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, etcd_server: EtcdServer, model: str) -> tuple[str, str]:
    """Training and state digest after six steps without a failure."""
    etcd = BlockingEtcd([etcd_server.endpoint])
    etcd.delete(keys.head(RUN))
    end = _end(train(_place(tmp_path_factory.mktemp("undisturbed"), etcd, model)))
    etcd.close()
    return end


def test_a_reader_of_the_log_holds_the_trainers_bits(tmp_path: Path, etcd: BlockingEtcd, model: str) -> None:
    place = _place(tmp_path, etcd, model)
    trained = train(place)
    head = read_head(etcd)
    assert head is not None
    assert head.version == 6
    assert head.epoch == place.epoch
    reader, host = LogReader(store_fetch(DirectoryStore(place.store)), RUN), HostWeights(RUN)
    reader.restore(host, head.manifest)
    pieces = trained.stepper.policy.pieces()
    assert {piece.name for piece in pieces} == set(host.tensors)
    assert all(np.array_equal(piece.bits, host.tensors[piece.name]) for piece in pieces)
    manifest = reader.manifest(head.manifest)
    assert manifest.metrics["sync/density"] == manifest.changed / manifest.total
    assert manifest.step is not None
    assert len(manifest.step.batch) == 2
    assert manifest.step.cursor == 12
    assert {"reward/mean", "time/step", "time/wait_for_batch", "sync/payload_bytes", "perf/tokens_per_s"} <= set(
        manifest.metrics
    )
    reader.export(head.manifest, tmp_path / "exported")
    assert (tmp_path / "exported" / "tokenizer_config.json").exists()


@pytest.mark.parametrize(("where", "when"), [
    ("step", 0), ("step", 3), ("encoded", 0), ("encoded", 3), ("committed", 3), ("committed", 5),
])  # fmt: skip
def test_dying_anywhere_ends_with_the_same_bits(
    where: str,
    when: int,
    tmp_path: Path,
    etcd: BlockingEtcd,
    model: str,
    undisturbed: tuple[str, str],
    monkeypatch: Any,
) -> None:
    with monkeypatch.context() as patch:
        if where == "step":
            run = Stepper.run

            def dying_run(self: Stepper, batch: Batch, step: int) -> Any:
                outcome = run(self, batch, step)
                return outcome if step != when else _die()

            patch.setattr(Stepper, "run", dying_run)
        elif where == "encoded":
            write = WeightLog.publish_delta

            def dying_write(self: WeightLog, layout: Any, parent: Any, *rest: Any, **named: Any) -> Any:
                written = write(self, layout, parent, *rest, **named)
                return written if parent.version != when else _die()

            patch.setattr(WeightLog, "publish_delta", dying_write)
        else:
            publish = Publisher.publish

            def dying_publish(self: Publisher, record: Any, metrics: Any) -> Any:
                manifest = publish(self, record, metrics)
                return manifest if record.step != when else _die()

            patch.setattr(Publisher, "publish", dying_publish)
        place = _place(tmp_path, etcd, model, checkpoint={"snapshot_every": 2})
        with pytest.raises(Died):
            train(place)
    again = _again(place)
    assert _end(train(again)) == undisturbed
    assert again.controller.incidents == []
    restored = when + (where == "committed")
    # A death right after the commit comes before that version's snapshot.
    expected = when // 2 * 2
    assert again.gauges.get("snapshot_version") == expected
    assert again.gauges["replayed_steps"] == restored - expected


def _die() -> Any:
    raise Died


def test_an_old_epoch_cannot_commit(tmp_path: Path, etcd: BlockingEtcd, model: str) -> None:
    """Law 4."""
    place = _place(tmp_path, etcd, model)
    before: list[Any] = []

    def replaced() -> None:
        head = read_head(etcd)
        if head is not None and head.version == 2 and not before:
            before.append(head)
            own_trainer(etcd, 2)

    place.on_check = replaced
    with pytest.raises(Fenced):
        train(place)
    assert read_head(etcd) == before[0]
    with pytest.raises(Fenced):
        restore(place)


def test_law_1_a_head_that_another_moved_is_not_overwritten(tmp_path: Path, etcd: BlockingEtcd, model: str) -> None:
    """Even under the right epoch: a commit follows the head that it was made from, or does not happen."""
    place = _place(tmp_path, etcd, model)
    trained = restore(place)
    moved = etcd.get(keys.head(RUN))
    assert moved is not None
    etcd.put(keys.head(RUN), moved.value)
    with pytest.raises(Conflict, match="never saw"):
        trained.publisher.publish(StepRecord(step=0), {})
    head = read_head(etcd)
    assert head is not None
    assert head.version == 0


def test_a_head_that_etcd_lost_is_no_reason_to_begin_anew(tmp_path: Path, etcd: BlockingEtcd, model: str) -> None:
    place = _place(tmp_path, etcd, model)
    restore(place)
    etcd.delete(keys.head(RUN))
    with pytest.raises(UsageError, match="versions up to 0 are committed"):
        restore(_again(place))
    assert read_head(etcd) is None


def test_the_base_advances_only_on_commit(tmp_path: Path, etcd: BlockingEtcd, model: str) -> None:
    """Law 1: an attempt that was refused leaves the comparison base, so nothing of it is lost in the next delta."""
    place = _place(tmp_path, etcd, model)
    trained = restore(place)
    base = [piece.bits.copy() for piece in trained.publisher._base]
    own_trainer(etcd, 2)
    for shard in trained.stepper.policy.shards:
        shard.master.mul_(1.5)
    trained.stepper.policy.cast()
    with pytest.raises(Fenced):
        trained.publisher.publish(StepRecord(step=0), {})
    assert all(np.array_equal(old, now.bits) for old, now in zip(base, trained.publisher._base, strict=True))
    head = read_head(etcd)
    assert head is not None
    assert head.version == 0


def test_a_commit_whose_answer_was_lost_is_found_out(tmp_path: Path, etcd: BlockingEtcd, model: str) -> None:
    place = _place(tmp_path, etcd, model, max_steps=3)

    class Lossy:
        """Carries out every second transaction without telling."""

        def __init__(self) -> None:
            self.calls = 0

        def get(self, key: str) -> Any:
            return etcd.get(key)

        def txn(self, compares: Any, operations: Any) -> Any:
            self.calls += 1
            if self.calls % 3 == 1:
                raise Unreachable("lost before")
            result = etcd.txn(compares, operations)
            if self.calls % 3 == 2:
                raise Unreachable("lost after")
            return result

    place.etcd = Lossy()
    train(place)
    head = read_head(etcd)
    assert head is not None
    assert head.version == 3
    assert place.etcd.calls == 12
    assert any(note and "waits for etcd" in note for _, _, note in place.notes)


def test_a_full_store_delays_but_loses_nothing(
    tmp_path: Path, etcd: BlockingEtcd, model: str, undisturbed: tuple[str, str]
) -> None:
    place = _place(tmp_path, etcd, model)

    class Filling(DirectoryStore):
        left = 8

        def put(self, digest: str, data: bytes) -> None:
            head = read_head(etcd)
            if head is not None and head.version == 3 and self.left > 0:
                self.left -= 1
                raise StorageFull("no room")
            super().put(digest, data)

    assert _end(train(place, store=Filling(place.store))) == undisturbed
    assert any(kind == "storage_full" for kind, _ in place.controller.incidents)


def test_long_work_shows_that_it_moves(tmp_path: Path, etcd: BlockingEtcd, model: str) -> None:
    """A step or a snapshot may take longer than a hang may: each part of it that is done counts."""
    place = _place(tmp_path, etcd, model, max_steps=1, checkpoint={"snapshot_every": 100})
    trained = train(place)  # over a store that does not tell
    after_the_step = place.ticks
    assert after_the_step >= 1
    trained.publisher._log.store = TickingStore(DirectoryStore(place.store), place.tick)
    assert trained.publisher.snapshot()
    assert place.ticks >= after_the_step + 3


def test_a_snapshot_that_found_no_room_gives_back_what_it_took(tmp_path: Path, etcd: BlockingEtcd, model: str) -> None:
    place = _place(tmp_path, etcd, model, max_steps=1, checkpoint={"snapshot_every": 100})

    class Filling(DirectoryStore):
        left = 10**6

        def put(self, digest: str, data: bytes) -> None:
            if self.left <= 0:
                raise StorageFull("no room")
            self.left -= 1
            super().put(digest, data)

    store = Filling(place.store)
    publisher = train(place, store=store).publisher
    before = store.list("chunks/")
    store.left = 3
    assert not publisher.snapshot()
    assert store.left == 0
    assert store.list("chunks/") == before
    assert [kind for kind, _ in place.controller.incidents] == ["storage_full"]
    store.left = 10**6
    assert publisher.snapshot()


def test_a_tampered_version_is_detected_in_replay(tmp_path: Path, etcd: BlockingEtcd, model: str) -> None:
    """The log is right: a step that does not reproduce it is reported, and the log's weights are taken over."""
    place = _place(tmp_path, etcd, model, max_steps=4, checkpoint={"snapshot_every": 100})
    publish = Publisher.publish

    def nudged(self: Publisher, record: Any, metrics: Any) -> Any:
        if record.step == 2:
            with torch.no_grad():
                self._policy.shards[0].master[:5] += 0.25
            self._policy.cast()
        return publish(self, record, metrics)

    Publisher.publish = nudged  # type: ignore[method-assign]
    try:
        first = train(place)
    finally:
        Publisher.publish = publish  # type: ignore[method-assign]
    again = _again(place)
    trained = restore(again)
    kinds = [kind for kind, _ in again.controller.incidents]
    assert kinds
    assert set(kinds) == {"replay_mismatch"}
    assert "step 2" in again.controller.incidents[0][1]
    assert trained.stepper.policy.state_digest() == first.stepper.policy.state_digest()


def test_a_damaged_snapshot_is_passed_over(
    tmp_path: Path, etcd: BlockingEtcd, model: str, undisturbed: tuple[str, str]
) -> None:
    place = _place(tmp_path, etcd, model, checkpoint={"snapshot_every": 2})
    train(place)
    head = read_head(etcd)
    assert head is not None
    store = DirectoryStore(place.store)
    reader = LogReader(store_fetch(store), RUN)
    newest = reader.snapshot_manifest(reader.newest_snapshot(store, head.manifest))
    assert newest.version == 6
    victim = newest.chunk_digests()[0]
    store.delete(f"chunks/{victim[:2]}/{victim}")
    again = _again(place)
    assert _end(restore(again)) == undisturbed
    assert again.gauges["snapshot_version"] == 4
    assert [kind for kind, _ in again.controller.incidents] == ["corrupt_chunk"]


def test_without_any_snapshot_the_weights_go_on_and_it_is_said(tmp_path: Path, etcd: BlockingEtcd, model: str) -> None:
    place = _place(tmp_path, etcd, model, max_steps=3, checkpoint={"snapshot_every": 100})
    first = train(place)
    store = DirectoryStore(place.store)
    for name in store.list(f"runs/{RUN}/snapshots/"):
        digest = name.rpartition("-")[2].rpartition("/")[2]
        store.delete(f"chunks/{digest[:2]}/{digest}")
        store.delete(name)
    again = _again(place)
    trained = restore(again)
    assert trained.stepper.policy.state_digest() == first.stepper.policy.state_digest()
    assert [kind for kind, _ in again.controller.incidents] == ["corrupt_chunk", "snapshot_lost"]


def test_nothing_uncommitted_is_restored(tmp_path: Path, etcd: BlockingEtcd, model: str) -> None:
    """Manifests and snapshots of an attempt that was never committed lie in the store; no restore sees them."""
    place = _place(tmp_path, etcd, model, max_steps=2)
    trained = train(place)
    publisher = trained.publisher
    for shard in trained.stepper.policy.shards:
        shard.master.mul_(1.5)
    trained.stepper.policy.cast()
    own_trainer(etcd, 2)
    with pytest.raises(Fenced):
        publisher.publish(StepRecord(step=2), {})
    again = _again(place)
    restored = restore(again)
    head = read_head(etcd)
    assert head is not None
    assert head.version == 2
    assert restored.publisher.head is not None
    assert restored.publisher.head[0] == head.manifest
    assert again.controller.incidents == []


def test_the_store_in_memory_serves_as_well(tmp_path: Path, etcd: BlockingEtcd, model: str) -> None:
    store = MemoryStore()
    place = _place(tmp_path, etcd, model, max_steps=1)
    place.controller._store = store
    train(place, store=store)
    assert not place.store.exists() or not any(place.store.rglob("chunks/*/*"))
