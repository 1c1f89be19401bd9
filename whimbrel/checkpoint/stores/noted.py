"""A store that notes which chunks it did not have before, so that an attempt that fails can be taken back."""

from __future__ import annotations

from whimbrel.checkpoint.stores.base import Store


class NotedStore:
    """Any store; `fresh` are the digests that were put through this object and were not there before."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.fresh: set[str] = set()

    def put(self, digest: str, data: bytes) -> None:
        new = self._store.size(digest) is None
        self._store.put(digest, data)
        if new:
            self.fresh.add(digest)

    def get(self, digest: str, offset: int = 0, length: int | None = None) -> bytes:
        return self._store.get(digest, offset, length)

    def size(self, digest: str) -> int | None:
        return self._store.size(digest)

    def create(self, name: str, data: bytes) -> bool:
        return self._store.create(name, data)

    def read(self, name: str) -> bytes | None:
        return self._store.read(name)

    def list(self, prefix: str) -> list[str]:
        return self._store.list(prefix)

    def delete(self, name: str) -> None:
        self._store.delete(name)
