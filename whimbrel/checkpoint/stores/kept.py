"""A store that remembers the newest chunks it was given, and can write them again when the disk lost or changed them.

A delta that rots before any reader fetched it would stop every follower at the version before it, and the trainer with
them. Its writer still has the bytes for a while.
"""

from __future__ import annotations

import threading

from whimbrel.checkpoint.stores.base import Store, StoreAround, chunk_name
from whimbrel.errors import Corrupt, MissingChunk
from whimbrel.limits import KEPT_CHUNKS_BYTES


class KeptStore(StoreAround):
    """Any store, with a bounded memory of what was put last. Thread-safe as far as the store is."""

    def __init__(self, store: Store, keep_bytes: int = KEPT_CHUNKS_BYTES) -> None:
        super().__init__(store)
        self._keep_bytes = keep_bytes
        self._kept: dict[str, bytes] = {}
        self._kept_bytes = 0
        self._lock = threading.Lock()

    def heal(self) -> list[str]:
        """Write again what is kept here and is damaged or missing in the store; the digests of these chunks.

        Raises:
            StorageFull: there is no room.
        """
        healed = []
        with self._lock:
            kept = list(self._kept.items())
        for digest, data in kept:
            try:
                self._store.get(digest)
            except (Corrupt, MissingChunk):
                self._store.delete(chunk_name(digest))
                self._store.put(digest, data)
                healed.append(digest)
        return healed

    def put(self, digest: str, data: bytes) -> None:
        super().put(digest, data)
        with self._lock:
            self._forget(digest)
            self._kept[digest] = data
            self._kept_bytes += len(data)
            while self._kept_bytes > self._keep_bytes:
                self._forget(next(iter(self._kept)))

    def delete(self, name: str) -> None:
        # What retention removes must not come back.
        with self._lock:
            self._forget(name.rpartition("/")[2])
        super().delete(name)

    def _forget(self, digest: str) -> None:
        self._kept_bytes -= len(self._kept.pop(digest, b""))
