from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from agents.trainer import loop
from agents.trainer.batch import Batch
from agents.trainer.batches import BatchFetcher
from agents.trainer.place import ChunkSources, Incidents
from agents.trainer.step import StepOutcome, Stepper
from tests.trainer.stage import FakePlace, own_trainer, read_head, restore, train
from tests.trainer.support import make_group, make_spec, pack_group
from whimbrel.checkpoint import DirectoryStore, KeptStore, LogReader, MemoryStore, store_fetch
from whimbrel.coordination import BlockingEtcd, EtcdServer
from whimbrel.errors import Fenced, UsageError
from whimbrel.limits import NONFINITE_STEPS_MAX


def _place(root: Path, etcd: BlockingEtcd, model: str, **changes: object) -> FakePlace:
    return FakePlace(root, etcd, make_spec(model, **changes), own_trainer(etcd))


def _fetcher(place: FakePlace, peers: Any = None) -> BatchFetcher:
    chunks = ChunkSources(DirectoryStore(place.store), peers, lambda: ["peer:1"] if peers else [])
    return BatchFetcher(place.controller, place.caller, chunks, Incidents(place.controller, speaks=True), 65)


def _wait_for(condition: Any, deadline_s: float = 10.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def test_the_trainer_works_on_while_the_controller_is_away(tmp_path: Path, etcd: BlockingEtcd, model: str) -> None:
    """Law 5: one batch is fetched ahead; its step is trained and committed without the controller."""
    place = _place(tmp_path, etcd, model, max_steps=4)
    controller = place.controller
    run = Stepper.run

    def leaving(self: Stepper, batch: Batch, step: int) -> StepOutcome:
        if step == 1:
            _wait_for(lambda: 2 in controller.asked)
            time.sleep(0.1)
            controller.away = True
            threading.Timer(2.5, setattr, (controller, "away", False)).start()
        return run(self, batch, step)

    seen: list[int] = []

    def look() -> None:
        head = read_head(etcd)
        if controller.away and head is not None:
            seen.append(head.version)

    place.on_check = look
    try:
        Stepper.run = leaving  # type: ignore[method-assign]
        train(place)
    finally:
        Stepper.run = run  # type: ignore[method-assign]
    assert max(seen) == 3
    assert any(note == "The controller is away." for phase, _, note in place.notes if phase == "waiting")
    head = read_head(etcd)
    assert head is not None
    assert head.version == 4


def test_law_5_the_commit_waits_for_etcd_and_nothing_is_lost(tmp_path: Path, own_etcd: EtcdServer, model: str) -> None:
    etcd = BlockingEtcd([own_etcd.endpoint])
    place = _place(tmp_path, etcd, model, max_steps=3)
    cut, back = threading.Event(), threading.Event()

    def waiting() -> bool:
        return any(note and "waits for etcd" in note for _, _, note in place.notes)

    def look() -> None:
        if not cut.is_set() and ("working", 1, "step 1") in place.notes:
            cut.set()
            own_etcd.kill()
        elif cut.is_set() and not back.is_set() and waiting():
            back.set()
            own_etcd.start()

    place.on_check = look
    try:
        train(place)
        head = read_head(etcd)
    finally:
        etcd.close()
    assert back.is_set()
    assert head is not None
    assert head.version == 3


def test_a_group_that_nobody_holds_is_reported_missing(tmp_path: Path, etcd: BlockingEtcd, model: str) -> None:
    place = _place(tmp_path, etcd, model)
    place.controller.lose = {"grp_0_1"}
    fetcher = _fetcher(place)
    fetched = fetcher.take(0, 10.0)
    fetcher.close()
    assert fetched is not None
    assert place.controller.missing == [[], ["grp_0_1"]]
    assert [group.group_id for group in fetched.decode()] == ["grp_0_0", "grp_0_1"]


def test_payloads_come_from_other_nodes_and_stay_in_the_own_store(
    tmp_path: Path, etcd: BlockingEtcd, model: str
) -> None:
    """A step record must be replayable from the trainer's own store."""
    place = _place(tmp_path, etcd, model)
    place.controller._store = far = MemoryStore()

    class Peers:
        def fetch(self, digests: Any, sources: Any) -> dict[str, bytes]:
            assert sources == ["peer:1"]
            return {digest: far.get(digest) for digest in digests}

    fetcher = _fetcher(place, Peers())
    fetched = fetcher.take(0, 10.0)
    fetcher.close()
    assert fetched is not None
    store = DirectoryStore(place.store)
    assert [store.get(group.payload) for group in fetched.groups] == list(fetched.payloads)


def test_a_payload_that_cannot_be_trained_on_is_not_used(tmp_path: Path, etcd: BlockingEtcd, model: str) -> None:
    place = _place(tmp_path, etcd, model)
    entry, data = pack_group(make_group(5, 0))  # its tokens are of version 5, which step 0 cannot know
    store = DirectoryStore(place.store)
    store.put(entry.payload, data)
    batch = place.controller.batch
    calls: list[Any] = []

    def misleading(request: Any) -> Any:
        calls.append(request.missing)
        reply = batch(request)
        if len(calls) == 1:
            reply.groups[0] = entry
        return reply

    place.controller.batch = misleading
    fetcher = _fetcher(place)
    assert fetcher.take(0, 10.0) is not None
    fetcher.close()
    assert calls == [[], [entry.group_id]]
    assert [kind for kind, _ in place.controller.incidents] == ["corrupt_chunk"]


def test_a_fenced_fetcher_ends_the_trainer(tmp_path: Path, etcd: BlockingEtcd, model: str) -> None:
    place = _place(tmp_path, etcd, model)

    def fenced(_request: Any) -> Any:
        raise Fenced("A newer epoch is known.")

    place.controller.batch = fenced
    with pytest.raises(Fenced):
        train(place)


def test_a_paused_run_starts_no_step(tmp_path: Path, etcd: BlockingEtcd, model: str) -> None:
    place = _place(tmp_path, etcd, model, max_steps=1)
    place.paused = True
    versions: list[int] = []

    def look() -> None:
        head = read_head(etcd)
        versions.append(head.version if head else -1)
        place.paused = len(versions) < 4

    place.on_check = look
    train(place)
    assert versions[:4] == [0, 0, 0, 0]
    assert ("waiting", 0, "The run is paused.") in place.notes


def test_a_step_of_broken_numbers_uses_up_its_batch_and_leaves_the_weights(
    tmp_path: Path, etcd: BlockingEtcd, model: str
) -> None:
    place = _place(tmp_path, etcd, model, max_steps=3, checkpoint={"snapshot_every": 100})
    run = Stepper.run

    def broken(self: Stepper, batch: Batch, step: int) -> StepOutcome:
        if step != 1:
            return run(self, batch, step)
        with torch.no_grad():
            self.policy.shards[0].local()[:] = float("inf")
        outcome = run(self, batch, step)
        self.policy.cast()
        return outcome

    Stepper.run = broken  # type: ignore[method-assign]
    try:
        trained = train(place)
    finally:
        Stepper.run = run  # type: ignore[method-assign]
    assert [kind for kind, _ in place.controller.incidents] == ["numbers"]
    head = trained.publisher.head
    assert head is not None
    assert head[1].version == 3
    again = FakePlace(tmp_path, etcd, place.spec, own_trainer(etcd))
    assert restore(again).stepper.optimizer.training_digest() == trained.stepper.optimizer.training_digest()
    assert again.controller.incidents == []


def test_numbers_that_stay_broken_end_the_run_with_the_reason(tmp_path: Path, etcd: BlockingEtcd, model: str) -> None:
    place = _place(tmp_path, etcd, model)
    run = Stepper.run
    Stepper.run = lambda self, batch, step: StepOutcome(False, run(self, batch, step).metrics)  # type: ignore[method-assign]
    try:
        with pytest.raises(UsageError, match=f"{NONFINITE_STEPS_MAX} steps in a row"):
            train(place)
    finally:
        Stepper.run = run  # type: ignore[method-assign]
    head = read_head(etcd)
    assert head is not None
    assert head.version == NONFINITE_STEPS_MAX - 1


def test_incidents_are_kept_until_the_controller_is_back(tmp_path: Path, etcd: BlockingEtcd, model: str) -> None:
    controller = _place(tmp_path, etcd, model).controller
    incidents = Incidents(controller, speaks=True)
    controller.away = True
    incidents.report("numbers", "first")
    controller.away = False
    incidents.report("numbers", "second")
    assert [message for _, message in controller.incidents] == ["first", "second"]


def test_a_version_that_rots_before_anybody_fetched_it_is_written_again(
    tmp_path: Path, etcd: BlockingEtcd, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "HEAL_EVERY_S", 0.1)
    place = _place(tmp_path, etcd, model, max_steps=4)
    directory = DirectoryStore(place.store)
    rotten: list[str] = []

    def rot() -> None:
        head = read_head(etcd)
        if head is None or head.version != 2 or rotten:
            return
        manifest = LogReader(store_fetch(directory), place.run_id).manifest(head.manifest)
        rotten.extend(manifest.chunk_digests())
        for digest in rotten:
            (place.store / "chunks" / digest[:2] / digest).write_bytes(b"rotten")
        # Without whole chunks no rollout comes by this version, so no batch comes either.
        place.controller.away = True
        threading.Timer(4.0, setattr, (place.controller, "away", False)).start()

    place.on_check = rot
    train(place, store=KeptStore(directory))
    assert rotten
    for digest in rotten:
        assert directory.get(digest)
    assert [kind for kind, _ in place.controller.incidents] == ["corrupt_chunk"]
