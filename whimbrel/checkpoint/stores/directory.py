"""A store in a folder of a local or shared file system.

Each object is written to a temporary file, synced, and linked under its name, and then the folder is synced: a name that
can be seen is whole and durable. Temporary files live in `.tmp/`, which no object name can reach.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from whimbrel.checkpoint.stores.base import check_content, check_name, check_prefix, chunk_name
from whimbrel.delta import content_digest
from whimbrel.errors import MissingChunk, StorageFull
from whimbrel.limits import STALE_TEMPORARY_S

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_TEMPORARY: Final = ".tmp"


class DirectoryStore:
    """Objects as files below `path`, which is created."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._durable: set[Path] = set()
        self._lock = threading.Lock()
        with _full_disk(self.path):
            (self.path / _TEMPORARY).mkdir(parents=True, exist_ok=True)
        self._sweep()

    def _sweep(self) -> None:
        """Delete what processes that were killed while they wrote have left; nothing else would ever do it."""
        for path in (self.path / _TEMPORARY).iterdir():
            with contextlib.suppress(OSError):  # another process sweeps too
                if time.time() - path.stat().st_mtime > STALE_TEMPORARY_S:
                    path.unlink()

    def put(self, digest: str, data: bytes) -> None:
        path = self.path / chunk_name(digest)
        check_content(digest, data)
        if self._is_whole(path, digest, len(data)):
            # Another process may have written it a moment ago and not have synced the folder yet.
            self._sync_folder(path.parent)
            return
        self._write(path, data, replace=True)

    def get(self, digest: str, offset: int = 0, length: int | None = None) -> bytes:
        try:
            with (self.path / chunk_name(digest)).open("rb") as file:
                file.seek(offset)
                data = file.read() if length is None else file.read(length)
        except FileNotFoundError as error:
            raise MissingChunk(f"Chunk {digest} is not in the store {self.path}.", digest=digest) from error
        if offset == 0 and length is None:
            check_content(digest, data)
        return data

    def size(self, digest: str) -> int | None:
        try:
            return (self.path / chunk_name(digest)).stat().st_size
        except FileNotFoundError:
            return None

    def create(self, name: str, data: bytes) -> bool:
        return self._write(self.path / check_name(name), data, replace=False)

    def read(self, name: str) -> bytes | None:
        try:
            return (self.path / check_name(name)).read_bytes()
        except (FileNotFoundError, IsADirectoryError):
            return None

    def list(self, prefix: str) -> list[str]:
        root = self.path / check_prefix(prefix)
        found: list[str] = []
        for folder, folders, files in os.walk(root):
            folders[:] = [each for each in folders if not each.startswith(".")]
            found += [(Path(folder) / file).relative_to(self.path).as_posix() for file in files]
        return sorted(found)

    def delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            (self.path / check_name(name)).unlink()

    def _is_whole(self, path: Path, digest: str, nbytes: int) -> bool:
        """Whether the chunk is there unharmed: writing it again repairs one that rotted on the disk."""
        try:
            return path.stat().st_size == nbytes and content_digest(path.read_bytes()) == digest
        except FileNotFoundError:
            return False

    def _write(self, path: Path, data: bytes, *, replace: bool) -> bool:
        temporary = self.path / _TEMPORARY / uuid.uuid4().hex
        with _full_disk(self.path):
            self._make_folder(path.parent)
            try:
                with temporary.open("xb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                if replace:
                    temporary.replace(path)
                    created = True
                else:
                    created = _link(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)
            self._sync_folder(path.parent)
        return created

    def _make_folder(self, folder: Path) -> None:
        """Create missing folders and sync their parents, so that the way to the object is durable too."""
        with self._lock:
            if folder in self._durable:
                return
        missing: list[Path] = []
        at = folder
        while at != self.path and at not in self._durable:
            missing.append(at)
            at = at.parent
        for each in reversed(missing):
            each.mkdir(exist_ok=True)
            self._sync_folder(each.parent)
        with self._lock:
            self._durable.update(missing)

    def _sync_folder(self, folder: Path) -> None:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _link(temporary: Path, path: Path) -> bool:
    """Give the object its name unless the name is taken: a hard link is the file system's compare-and-set."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    return True


@contextlib.contextmanager
def _full_disk(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise StorageFull(
            f"No room is left in the store {path}.", hint="Free space there; what was committed is not affected."
        ) from error
