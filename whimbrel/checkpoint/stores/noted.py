"""A store that notes which chunks it did not have before, so that an attempt that fails can be taken back."""

from __future__ import annotations

from whimbrel.checkpoint.stores.base import Store, StoreAround


class NotedStore(StoreAround):
    """Any store; `fresh` are the digests that were put through this object and were not there before."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.fresh: set[str] = set()

    def put(self, digest: str, data: bytes) -> None:
        new = self.size(digest) is None
        super().put(digest, data)
        if new:
            self.fresh.add(digest)
