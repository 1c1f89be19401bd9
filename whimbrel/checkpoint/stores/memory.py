"""A store in memory: the twin of the others in tests and simulations."""

from __future__ import annotations

import threading

from whimbrel.checkpoint.stores.base import check_content, check_name, check_prefix, chunk_name
from whimbrel.errors import MissingChunk, StorageFull


class MemoryStore:
    """Objects in a dict. `capacity_bytes` bounds them, so that a full disk can be rehearsed."""

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self._objects: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def put(self, digest: str, data: bytes) -> None:
        name = chunk_name(digest)
        check_content(digest, data)
        self._write(name, data)

    def get(self, digest: str, offset: int = 0, length: int | None = None) -> bytes:
        data = self._objects.get(chunk_name(digest))
        if data is None:
            raise MissingChunk(f"Chunk {digest} is not in the store.", digest=digest)
        if offset == 0 and length is None:
            check_content(digest, data)
            return data
        return data[offset : None if length is None else offset + length]

    def size(self, digest: str) -> int | None:
        data = self._objects.get(chunk_name(digest))
        return None if data is None else len(data)

    def create(self, name: str, data: bytes) -> bool:
        return self._write(check_name(name), data)

    def read(self, name: str) -> bytes | None:
        return self._objects.get(check_name(name))

    def list(self, prefix: str) -> list[str]:
        check_prefix(prefix)
        with self._lock:
            return sorted(name for name in self._objects if name.startswith(prefix))

    def delete(self, name: str) -> None:
        with self._lock:
            self._objects.pop(check_name(name), None)

    def _write(self, name: str, data: bytes) -> bool:
        with self._lock:
            if name in self._objects:
                return False
            used = sum(map(len, self._objects.values())) if self.capacity_bytes is not None else 0
            if self.capacity_bytes is not None and used + len(data) > self.capacity_bytes:
                raise StorageFull(
                    f"The store has no room for {len(data)} bytes.", hint="Free space, or raise its size."
                )
            self._objects[name] = bytes(data)
            return True
