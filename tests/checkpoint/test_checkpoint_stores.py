"""One contract, every store."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path

import pytest

from whimbrel.checkpoint import DirectoryStore, KeptStore, MemoryStore, Store
from whimbrel.checkpoint.stores import chunk_name
from whimbrel.delta import content_digest
from whimbrel.errors import Corrupt, MissingChunk, StorageFull, UsageError
from whimbrel.limits import STALE_TEMPORARY_S

DATA = b"some bytes of a chunk"
DIGEST = content_digest(DATA)


@pytest.fixture(params=["memory", "directory", "kept"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "memory":
        return MemoryStore()
    directory = DirectoryStore(tmp_path / "store")
    return directory if request.param == "directory" else KeptStore(directory)


def test_what_was_put_can_be_read_whole_and_in_ranges(store: Store) -> None:
    store.put(DIGEST, DATA)
    store.put(DIGEST, DATA)
    assert store.get(DIGEST) == DATA
    assert store.get(DIGEST, 5) == DATA[5:]
    assert store.get(DIGEST, 5, 5) == DATA[5:10]
    assert store.get(DIGEST, 1000, 5) == b""
    assert store.size(DIGEST) == len(DATA)
    assert store.list("chunks/") == [f"chunks/{DIGEST[:2]}/{DIGEST}"]


def test_a_chunk_under_a_wrong_name_is_refused(store: Store) -> None:
    with pytest.raises(Corrupt):
        store.put(DIGEST, DATA + b"!")
    assert store.size(DIGEST) is None


def test_a_missing_chunk_is_named(store: Store) -> None:
    assert store.size(DIGEST) is None
    with pytest.raises(MissingChunk, match=DIGEST):
        store.get(DIGEST)


def test_a_named_object_is_created_once(store: Store) -> None:
    assert store.read("runs/r/commits/1") is None
    assert store.create("runs/r/commits/1", b"one")
    assert not store.create("runs/r/commits/1", b"two")
    assert store.read("runs/r/commits/1") == b"one"


def test_only_one_of_many_creates_a_name(store: Store) -> None:
    won: list[int] = []

    def race(number: int) -> None:
        if store.create("runs/r/one", str(number).encode()):
            won.append(number)

    threads = [threading.Thread(target=race, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert store.read("runs/r/one") == str(won[0]).encode()
    assert len(won) == 1


def test_lists_are_sorted_and_of_one_folder(store: Store) -> None:
    for name in ("runs/b/2", "runs/b/1", "runs/a/1", "runs/bb/1"):
        store.create(name, b"")
    assert store.list("runs/b/") == ["runs/b/1", "runs/b/2"]
    assert store.list("runs/none/") == []
    assert len(store.list("")) == 4


def test_delete_is_idempotent(store: Store) -> None:
    store.put(DIGEST, DATA)
    name = f"chunks/{DIGEST[:2]}/{DIGEST}"
    store.delete(name)
    store.delete(name)
    assert store.size(DIGEST) is None
    assert store.list("chunks/") == []


@pytest.mark.parametrize(
    "name", ["", "/etc/passwd", "a/../b", "..", "a//b", ".tmp/x", "a/.b", "a\0b", "a b", "x" * 200, "a/" * 9]
)
def test_names_cannot_leave_the_store(store: Store, name: str) -> None:
    for call in (store.read, store.delete, lambda n: store.create(n, b"")):
        with pytest.raises(UsageError):
            call(name)
    with pytest.raises(UsageError):
        store.list("../")


@pytest.mark.parametrize("digest", ["", "../../etc/passwd", "ABCDEF" * 5, DIGEST + "0", DIGEST[:-1] + "/"])
def test_digests_cannot_leave_the_store(store: Store, digest: str) -> None:
    for call in (store.get, store.size, lambda d: store.put(d, DATA)):
        with pytest.raises(UsageError):
            call(digest)


def test_what_a_killed_writer_left_is_deleted_and_what_is_being_written_is_not(tmp_path: Path) -> None:
    DirectoryStore(tmp_path)
    for name, age_s in (("left", STALE_TEMPORARY_S + 60), ("written-now", 1)):
        path = tmp_path / ".tmp" / name
        path.write_bytes(b"part")
        os.utime(path, (time.time() - age_s,) * 2)
    DirectoryStore(tmp_path)
    assert [path.name for path in (tmp_path / ".tmp").iterdir()] == ["written-now"]


def test_a_full_memory_store_keeps_what_it_has() -> None:
    store = MemoryStore(capacity_bytes=len(DATA) + 2)
    store.put(DIGEST, DATA)
    with pytest.raises(StorageFull):
        store.put(content_digest(b"more"), b"more")
    assert store.get(DIGEST) == DATA


def test_a_full_disk_is_storage_full_and_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DirectoryStore(tmp_path)
    store.put(DIGEST, DATA)
    real = os.fsync

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageFull, match="No room"):
        store.put(content_digest(b"more"), b"more")
    with pytest.raises(StorageFull):
        store.create("runs/r/x", b"more")
    monkeypatch.setattr(os, "fsync", real)
    assert store.size(content_digest(b"more")) is None
    assert store.read("runs/r/x") is None
    assert list((tmp_path / ".tmp").iterdir()) == []
    assert store.get(DIGEST) == DATA


def test_a_chunk_that_rotted_on_disk_is_corrupt_and_repaired_by_the_next_put(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    store.put(DIGEST, DATA)
    path = tmp_path / "chunks" / DIGEST[:2] / DIGEST
    path.write_bytes(DATA[:-1] + b"?")
    with pytest.raises(Corrupt):
        store.get(DIGEST)
    store.put(DIGEST, DATA)
    assert store.get(DIGEST) == DATA


def test_law_1_files_and_their_folders_are_synced_before_put_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    real = os.fsync

    def spy(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", spy)
    DirectoryStore(tmp_path).put(DIGEST, DATA)
    folder = tmp_path / "chunks" / DIGEST[:2]
    assert [Path(each) for each in synced[:2]] == [tmp_path, tmp_path / "chunks"], "the way to a new folder"
    assert ".tmp/" in synced[2]
    assert Path(synced[3]) == folder


def test_the_writer_of_a_chunk_that_the_disk_lost_or_changed_writes_it_again(tmp_path: Path) -> None:
    directory = DirectoryStore(tmp_path / "store")
    kept = KeptStore(directory, keep_bytes=60)
    chunks = {content_digest(data): data for data in (b"a" * 30, b"b" * 30, b"c" * 30)}
    for digest, data in chunks.items():
        kept.put(digest, data)
    first, second, third = chunks
    assert kept.heal() == []
    (tmp_path / "store" / chunk_name(second)).write_bytes(b"rotten")
    directory.delete(chunk_name(third))
    assert kept.heal() == [second, third]
    assert (directory.get(second), directory.get(third)) == (chunks[second], chunks[third])
    directory.delete(chunk_name(first))
    kept.delete(chunk_name(third))
    assert kept.heal() == [], "what fell out of the bounded memory, or was retired, does not come back"
    assert directory.size(third) is None
