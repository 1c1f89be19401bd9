"""Snapshots: the full training state (fp32 masters, moments, …) in chunks, written by the ranks, verified when read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from whimbrel import limits
from whimbrel.checkpoint.anchor import read_chunks
from whimbrel.checkpoint.manifest import ArrayPart, ChunkRef, SnapshotManifest, total_bytes
from whimbrel.checkpoint.stores import Fetch, Store
from whimbrel.delta import Bits, add_digests, array_digest, content_digest, digest_hex
from whimbrel.errors import Corrupt, DigestMismatch, UsageError

_KINDS: Final = "biuf"
"""numpy kinds that a snapshot carries: their bytes mean the same on every machine."""


@dataclass(frozen=True, slots=True, eq=False)
class ArrayShard:
    """The flat range [start, start + values.size) of an array whose full shape is `shape`."""

    key: str
    shape: tuple[int, ...]
    start: int
    values: NDArray[Any]


class SnapshotPart(msgspec.Struct, frozen=True):
    """What one rank wrote of a snapshot."""

    arrays: list[ArrayPart]
    digest: int
    """Training digest of this part."""


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """A training state as read back: whole arrays in their shapes."""

    manifest: SnapshotManifest
    arrays: dict[str, NDArray[Any]]

    @property
    def meta(self) -> dict[str, Any]:
        """What the trainer stored beside the arrays."""
        return self.manifest.meta


def whole_arrays(arrays: Mapping[str, NDArray[Any]]) -> list[ArrayShard]:
    """Shards of a state that one rank holds whole."""
    return [ArrayShard(key, array.shape, 0, array.reshape(-1)) for key, array in arrays.items()]


def training_digest(shards: Iterable[ArrayShard]) -> int:
    """Additive digest of a training state: the sum over ranks, modulo 2^64, does not depend on order or sharding.

    Raises:
        UsageError: an array of a dtype that a snapshot cannot carry.
    """
    return add_digests(
        array_digest(shard.key, _dtype(shard.values).str, shard.start, _bits(shard.values)) for shard in shards
    )


def combine_digests(digests: Iterable[int]) -> str:
    """The ranks' training digests as one, 16 hex digits."""
    return digest_hex(add_digests(digests))


def write_snapshot_part(store: Store, shards: Sequence[ArrayShard]) -> SnapshotPart:
    """Store this rank's shards.

    Raises:
        UsageError: a shard outside its array, or of a dtype that a snapshot cannot carry. StorageFull.
    """
    parts: list[ArrayPart] = []
    for shard in shards:
        if shard.start < 0 or shard.start + shard.values.size > math.prod(shard.shape):
            raise UsageError(f"The shard of {shard.key!r} at {shard.start} does not fit its shape {shard.shape}.")
        data = _bits(shard.values).view(np.uint8).data
        refs: list[ChunkRef] = []
        for at in range(0, len(data), limits.CHUNK_TARGET_BYTES):
            part = bytes(data[at : at + limits.CHUNK_TARGET_BYTES])
            digest = content_digest(part)
            store.put(digest, part)
            refs.append(ChunkRef(digest, len(part)))
        dtype = _dtype(shard.values).str
        parts.append(ArrayPart(shard.key, dtype, shard.shape, shard.start, shard.values.size, refs))
    return SnapshotPart(parts, training_digest(shards))


def join_snapshot_parts(parts: Sequence[SnapshotPart]) -> list[ArrayPart]:
    """The arrays of all ranks in order.

    Raises:
        UsageError: they do not make up whole arrays.
    """
    joined = sorted((each for part in parts for each in part.arrays), key=lambda each: (each.key, each.start))
    fault = _incomplete(joined)
    if fault:
        raise UsageError(f"The snapshot is not complete: {fault}.")
    return joined


def read_snapshot(fetch: Fetch, manifest: SnapshotManifest) -> Snapshot:
    """All arrays, whole, each chunk verified and then the training digest.

    Raises:
        Corrupt: the manifest or a chunk is not as it must be. DigestMismatch: the state is not the recorded one.
        MissingChunk.
    """
    fault = _incomplete(manifest.parts)
    if fault:
        raise Corrupt(f"The snapshot of version {manifest.version} is not complete: {fault}.")
    flat: dict[str, NDArray[Any]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for part in manifest.parts:
        if part.key not in flat:
            flat[part.key] = np.empty(math.prod(part.shape), np.dtype(part.dtype))
            shapes[part.key] = part.shape
        target = flat[part.key].view(np.uint8)
        at = part.start * flat[part.key].itemsize
        for data in read_chunks(fetch, part.chunks):
            target[at : at + len(data)] = np.frombuffer(data, np.uint8)
            at += len(data)
    found = combine_digests([training_digest(whole_arrays(flat))])
    if found != manifest.training_digest:
        raise DigestMismatch(
            f"The snapshot of version {manifest.version} has training digest {found}, "
            f"where {manifest.training_digest} was recorded."
        )
    return Snapshot(manifest, {key: array.reshape(shapes[key]) for key, array in flat.items()})


def _incomplete(parts: Sequence[ArrayPart]) -> str:
    """What is wrong with these parts, sorted by key and start; empty if they make up whole arrays."""
    ends: dict[str, int] = {}
    first: dict[str, ArrayPart] = {}
    for part in parts:
        head = first.setdefault(part.key, part)
        if (part.dtype, part.shape) != (head.dtype, head.shape):
            return f"the shards of {part.key!r} differ in dtype or shape"
        if part.dtype[1:2] not in _KINDS or part.dtype[:1] not in "<|" or part.dtype[2:] not in ("1", "2", "4", "8"):
            return f"{part.key!r} has dtype {part.dtype[:20]!r}"
        if any(size < 0 for size in part.shape) or part.elements < 0 or part.start != ends.get(part.key, 0):
            return f"the shards of {part.key!r} do not meet at element {ends.get(part.key, 0)}"
        if total_bytes(part.chunks) != part.elements * int(part.dtype[2:]) or any(
            ref.nbytes < 0 for ref in part.chunks
        ):
            return f"the chunks of {part.key!r} do not add up to its elements"
        ends[part.key] = part.start + part.elements
    for key, part in first.items():
        if ends[key] != math.prod(part.shape):
            return f"{key!r} has {ends[key]} of {math.prod(part.shape)} elements"
    return ""


def _dtype(values: NDArray[Any]) -> np.dtype[Any]:
    dtype = values.dtype
    if dtype.kind not in _KINDS or dtype.itemsize > 8 or dtype.str[0] == ">":
        raise UsageError(f"A snapshot cannot carry arrays of dtype {dtype}.", hint="Store bf16 as its uint16 bits.")
    return dtype


def _bits(values: NDArray[Any]) -> Bits:
    """Flat unsigned view of the values' bits; a copy only where they are not contiguous."""
    return np.ascontiguousarray(values).reshape(-1).view(f"u{_dtype(values).itemsize}")
