"""What a store can do. Chunks are named by their content; a few small named objects point at them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

from whimbrel.delta import content_digest
from whimbrel.errors import Corrupt, UsageError

CHUNKS: Final = "chunks/"
_DIGEST: Final = re.compile(r"[0-9a-f]{32}")
_SEGMENT: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")

Fetch = Callable[[Sequence[str]], Mapping[str, bytes]]
"""Bytes by digest, from wherever they come. Raises MissingChunk; callers verify what it returns."""


class Store(Protocol):
    """Durable bytes. What `put` or `create` returned from survives a crash of the process and of the machine."""

    def put(self, digest: str, data: bytes) -> None:
        """Store a chunk; again is no harm. Raises Corrupt if data and digest differ, StorageFull."""
        ...

    def get(self, digest: str, offset: int = 0, length: int | None = None) -> bytes:
        """A chunk or a range of it; verified when whole. Raises MissingChunk, Corrupt."""
        ...

    def size(self, digest: str) -> int | None:
        """Bytes of a chunk, or None if it is not there."""
        ...

    def create(self, name: str, data: bytes) -> bool:
        """Store a named object unless it exists; False if it does. Atomic. Raises StorageFull."""
        ...

    def read(self, name: str) -> bytes | None:
        """A named object's bytes, or None."""
        ...

    def list(self, prefix: str) -> list[str]:
        """Names that begin with `prefix` (a folder, ending in a slash), sorted; chunks are `chunks/ab/DIGEST`."""
        ...

    def delete(self, name: str) -> None:
        """Remove an object by name; one that is gone already is no error."""
        ...


class StoreAround:
    """A store that passes every verb on to another; subclasses add to some."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def put(self, digest: str, data: bytes) -> None:
        self._store.put(digest, data)

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


def chunk_name(digest: str) -> str:
    """The object name of a chunk.

    Raises:
        UsageError: not 32 hex digits.
    """
    if _DIGEST.fullmatch(digest) is None:
        raise UsageError(f"{digest[:80]!r} is no content digest.")
    return f"{CHUNKS}{digest[:2]}/{digest}"


def check_name(name: str) -> str:
    """Refuse names that could leave the store or meet its temporary files.

    Raises:
        UsageError: an empty, hidden or overlong segment, or a character outside letters, digits, `.`, `_` and `-`.
    """
    segments = name.split("/")
    if len(segments) > 8 or not all(_SEGMENT.fullmatch(segment) for segment in segments):
        raise UsageError(f"{name[:200]!r} is no valid object name.")
    return name


def check_prefix(prefix: str) -> str:
    """Refuse prefixes that are no folder of the store; the empty prefix is all of it.

    Raises:
        UsageError: it does not end in a slash, or is no valid name.
    """
    if prefix and (not prefix.endswith("/") or not check_name(prefix[:-1])):
        raise UsageError(f"{prefix[:200]!r} is no folder of the store.")
    return prefix


def check_content(digest: str, data: bytes) -> None:
    """Refuse bytes under a wrong name.

    Raises:
        Corrupt: they differ.
    """
    if content_digest(data) != digest:
        raise Corrupt(f"Chunk {digest} does not match its digest.", hint="It is fetched again from another source.")


def store_fetch(store: Store) -> Fetch:
    """Fetch from one store."""

    def fetch(digests: Sequence[str]) -> dict[str, bytes]:
        return {digest: store.get(digest) for digest in digests}

    return fetch
