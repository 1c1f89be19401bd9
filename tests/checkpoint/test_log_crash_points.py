"""Law 1: whatever stops a publication, and wherever, the head that was committed before can still be restored."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.checkpoint.log_world import RUN, Trainer, holds, reader_of, restored
from whimbrel.checkpoint import DirectoryStore, MemoryStore, Store, apply_retention, describe, verify_chain
from whimbrel.errors import StorageFull


class Crash(BaseException):
    """The process dies: not an exception that any code may handle."""


class FaultyStore:
    """A store that dies at its n-th write: before it, or after it but before the caller learns of it."""

    def __init__(self, inner: Store, *, after_effect: bool) -> None:
        self.inner = inner
        self.after_effect = after_effect
        self.writes_left: int | None = None

    def _write(self, effect: Callable[[], bool | None]) -> bool | None:
        if self.writes_left == 0 and not self.after_effect:
            raise Crash
        result = effect()
        if self.writes_left == 0:
            raise Crash
        if self.writes_left is not None:
            self.writes_left -= 1
        return result

    def put(self, digest: str, data: bytes) -> None:
        self._write(lambda: self.inner.put(digest, data))

    def create(self, name: str, data: bytes) -> bool:
        return bool(self._write(lambda: self.inner.create(name, data)))

    def delete(self, name: str) -> None:
        self._write(lambda: self.inner.delete(name))

    def get(self, digest: str, offset: int = 0, length: int | None = None) -> bytes:
        return self.inner.get(digest, offset, length)

    def size(self, digest: str) -> int | None:
        return self.inner.size(digest)

    def read(self, name: str) -> bytes | None:
        return self.inner.read(name)

    def list(self, prefix: str) -> list[str]:
        return self.inner.list(prefix)


def run_until_crash(action: Callable[[], object], store: FaultyStore, at: int) -> bool:
    """Whether the action met the crash; False once it has fewer writes than `at`."""
    store.writes_left = at
    try:
        action()
    except Crash:
        return True
    finally:
        store.writes_left = None
    return False


@pytest.mark.parametrize("after_effect", [False, True])
@pytest.mark.parametrize("action", ["step", "anchor", "snapshot"])
def test_law_1_a_crash_at_any_write_leaves_the_committed_head_restorable(action: str, after_effect: bool) -> None:
    at = 0
    while True:
        store = FaultyStore(MemoryStore(), after_effect=after_effect)
        trainer = Trainer(store)
        trainer.start()
        trainer.steps(2)
        committed, state, count = trainer.head, trainer.states[-1], len(trainer.links)
        crashed = run_until_crash(getattr(trainer, action), store, at)
        if not crashed:
            break
        assert holds(restored(store, committed), state)
        # Another epoch takes over from the head that was committed, whichever that is now, and goes on.
        successor = Trainer(store, epoch=2)
        successor.links, successor.states = trainer.links, trainer.states
        successor.base = restored(store, trainer.head).pieces()
        assert holds(restored(store, trainer.head), trainer.states[-1])
        assert len(trainer.links) - count in ((0, 1) if action == "step" else (0,))
        successor.steps(2)
        assert holds(restored(store, successor.head), successor.states[-1])
        assert verify_chain(store, RUN).manifest == successor.head
        assert [digest for digest, _ in describe(store, RUN).versions] == [digest for digest, _ in successor.links]
        at += 1
    assert at >= 3


def test_law_1_an_attempt_that_was_not_committed_is_seen_by_no_reader() -> None:
    store = MemoryStore()
    trainer = Trainer(store, epoch=1)
    trainer.start()
    trainer.steps(1)

    def lose_the_lease() -> None:
        raise Crash

    with pytest.raises(Crash):
        trainer.step(before_commit=lose_the_lease)
    successor = Trainer(store, epoch=2)
    successor.links, successor.states = list(trainer.links), list(trainer.states)
    successor.base = restored(store, trainer.head).pieces()
    assert describe(store, RUN).head_version == 1
    assert describe(store, RUN).uncommitted == 1
    successor.steps(1)
    described = describe(store, RUN)
    assert [digest for digest, _ in described.versions] == [digest for digest, _ in successor.links]
    assert described.uncommitted == 1
    assert described.versions[-1][1].epoch == 2


def test_law_1_the_base_advances_only_on_commit() -> None:
    trainer = Trainer()
    trainer.start()

    def fail() -> None:
        raise Crash

    with pytest.raises(Crash):
        trainer.step(before_commit=fail)
    assert holds(restored(trainer.store, trainer.head), {piece.name: piece.bits for piece in trainer.base})
    trainer.step()
    assert holds(restored(trainer.store, trainer.head), trainer.states[-1])


def test_a_full_store_loses_nothing_and_the_step_goes_on_once_there_is_room() -> None:
    store = MemoryStore()
    trainer = Trainer(store)
    trainer.start()
    trainer.steps(2)
    room = sum(len(store.read(name) or b"") for name in store.list(""))
    for extra in range(0, 3000, 50):
        store.capacity_bytes = room + extra
        try:
            trainer.step()
        except StorageFull:
            assert holds(restored(store, trainer.links[2][0]), trainer.states[2])
        else:
            break
    assert len(trainer.links) == 4
    assert holds(restored(store, trainer.head), trainer.states[-1])


@pytest.mark.parametrize("after_effect", [False, True])
def test_retention_can_crash_anywhere_and_is_run_again(after_effect: bool) -> None:
    at = 0
    while True:
        store = FaultyStore(MemoryStore(), after_effect=after_effect)
        trainer = Trainer(store)
        trainer.start()
        for _ in range(3):
            trainer.steps(2)
            trainer.anchor()
            trainer.snapshot()
        trainer.steps(1)
        crashed = run_until_crash(partial(apply_retention, store, RUN, trainer.head), store, at)
        assert holds(restored(store, trainer.head), trainer.states[-1])
        apply_retention(store, RUN, trainer.head)
        left = store.list("")
        assert apply_retention(store, RUN, trainer.head).names == []
        assert store.list("") == left
        assert store.list(f"runs/{RUN}/retention/") == []
        if at == 0:
            expected = left
        assert left == expected
        trainer.steps(1)
        assert holds(restored(store, trainer.head), trainer.states[-1])
        if not crashed:
            break
        at += 3
    assert at > 10


def test_law_1_a_directory_survives_a_process_that_dies_while_it_writes(tmp_path: Path) -> None:
    """Only whole files are ever visible under a chunk's name; what was half-written lies apart."""
    trainer = Trainer(DirectoryStore(tmp_path))
    trainer.start()
    trainer.steps(1)
    (tmp_path / ".tmp" / "left-behind").write_bytes(b"half a chu")
    again = DirectoryStore(tmp_path)
    assert holds(restored(again, trainer.head), trainer.states[-1])
    assert all(".tmp" not in name for name in again.list(""))
    assert reader_of(again).history(trainer.head)[-1][0] == trainer.head
