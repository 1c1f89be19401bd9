"""Chunks for one rollout: from the node's cache, else from chunk servers; everything verified, repairs reported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import structlog

from whimbrel.checkpoint import Store
from whimbrel.checkpoint.stores import chunk_name
from whimbrel.delta import content_digest
from whimbrel.errors import Corrupt, MissingChunk, StorageFull, Unreachable, WhimbrelError
from whimbrel.limits import PUT_ATTEMPTS

log = structlog.get_logger(__name__)


class Transfer(Protocol):
    """What is used of `whimbrel.transport.ChunkClient`."""

    def fetch(self, digests: Sequence[str], sources: Sequence[str]) -> dict[str, bytes]: ...

    def put(self, address: str, data: bytes, *, lasting: bool = True) -> str: ...


class Chunks:
    """Thread-safe as far as its store and client are."""

    def __init__(
        self,
        client: Transfer,
        cache: Store,
        sources: Callable[[], list[str]],
        on_corrupt: Callable[[str, str], None],
    ) -> None:
        """
        Args:
            cache: the node's chunk cache; its agent serves it to others.
            sources: chunk servers to ask, best first.
            on_corrupt: called with a digest and a sentence when held bytes were not what they must be.
        """
        self._client = client
        self._cache = cache
        self._sources = sources
        self._on_corrupt = on_corrupt
        self.bytes_received = 0

    def fetch(self, digests: Sequence[str]) -> dict[str, bytes]:
        """Bytes by digest. Raises MissingChunk, Unreachable, Corrupt: no source has right bytes."""
        found: dict[str, bytes] = {}
        for digest in dict.fromkeys(digests):
            held = self._held(digest)
            if held is not None:
                found[digest] = held
        wanted = [digest for digest in dict.fromkeys(digests) if digest not in found]
        if not wanted:
            return found
        fetched = self._client.fetch(wanted, self._sources())
        for digest in wanted:
            data = fetched[digest]
            if content_digest(data) != digest:
                raise Corrupt(f"Chunk {digest} arrived with other bytes.", hint="It is fetched again.")
            self.bytes_received += len(data)
            self._keep(digest, data)
        return {**found, **fetched}

    def forget(self, digests: Sequence[str]) -> None:
        """Remove chunks from the cache, so that the next fetch asks a server."""
        for digest in digests:
            self._cache.delete(chunk_name(digest))

    def put(self, data: bytes, *, lasting: bool = True) -> str:
        """Store a payload durably at the first chunk server that takes it, best the one near the trainer.

        What need not be `lasting`, an unfinished group, may be gone when it is asked for; it is then sampled afresh.

        Raises:
            Unreachable: none takes it now.
        """
        last: WhimbrelError | None = None
        for _ in range(PUT_ATTEMPTS):
            for address in self._sources():
                try:
                    return self._client.put(address, data, lasting=lasting)
                except (Unreachable, StorageFull, Corrupt) as error:
                    last = error
        raise Unreachable(
            f"No chunk server takes a payload of {len(data)} bytes now ({last}).",
            hint="It is kept in memory and sent again.",
        )

    def _held(self, digest: str) -> bytes | None:
        try:
            data = self._cache.get(digest)
        except MissingChunk:
            return None
        except Corrupt:
            data = b""
        if content_digest(data) == digest:
            return data
        self._on_corrupt(digest, f"Chunk {digest} in the node's cache has other bytes; it is fetched again.")
        self.forget([digest])
        return None

    def _keep(self, digest: str, data: bytes) -> None:
        try:
            self._cache.put(digest, data)
        except StorageFull as error:
            log.warning("the node's chunk cache takes nothing", error=str(error))
