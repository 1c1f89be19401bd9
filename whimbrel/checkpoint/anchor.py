"""Anchors as ordinary safetensors bytes, cut into chunks; and back.

The file's bytes follow from the layout alone, so that every rank knows where its shard lies and writes only that.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from whimbrel import limits
from whimbrel.checkpoint.manifest import WEIGHTS_FILE, ChunkRef, FileRecord, Manifest
from whimbrel.checkpoint.stores import Fetch, Store
from whimbrel.delta import (
    Bits,
    Layout,
    Piece,
    bits_dtype,
    check_pieces,
    content_digest,
    item_bytes,
    layout_from_manifest,
    state_digest,
)
from whimbrel.errors import Corrupt, LimitReached, MissingChunk, UsageError
from whimbrel.limits import ANCHOR_BATCH_BYTES


class PlacedChunk(msgspec.Struct, frozen=True, array_like=True):
    """A chunk and where it lies in the weights file."""

    offset: int
    digest: str
    nbytes: int


class AnchorPart(msgspec.Struct, frozen=True):
    """What one rank wrote of an anchor, to be joined with the other ranks' parts in one manifest."""

    chunks: list[PlacedChunk]
    covered: int
    """Elements written; over all ranks they must make up the whole layout."""
    digest: int
    """State digest of this part."""


class WeightsFile:
    """Where each tensor lies in the safetensors file of a layout: widest dtype first, so that all are aligned."""

    def __init__(self, layout: Layout) -> None:
        order = sorted(layout.tensors, key=lambda spec: (-item_bytes(spec.dtype), spec.name))
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._starts: dict[str, int] = {}
        at = 0
        for spec in order:
            stop = at + spec.elements * item_bytes(spec.dtype)
            entries[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [at, stop]}
            self._starts[spec.name] = at
            at = stop
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        self.header = struct.pack("<Q", len(text)) + text
        self.nbytes = len(self.header) + at

    def data_start(self, name: str) -> int:
        """Byte at which a tensor begins, counted from the end of the header."""
        return self._starts[name]


def write_anchor_part(store: Store, layout: Layout, pieces: Sequence[Piece]) -> AnchorPart:
    """Store this rank's pieces as chunks of the weights file.

    Raises:
        UsageError: pieces that do not fit the layout. StorageFull.
    """
    check_pieces(layout, pieces)
    file = WeightsFile(layout)
    placed: list[PlacedChunk] = []
    for offset, data in _runs(layout, file, pieces):
        digest = content_digest(data)
        store.put(digest, data)
        placed.append(PlacedChunk(offset, digest, len(data)))
    return AnchorPart(placed, sum(piece.bits.size for piece in pieces), state_digest(layout, pieces))


def _runs(layout: Layout, file: WeightsFile, pieces: Sequence[Piece]) -> Iterator[tuple[int, bytes]]:
    """(file offset, bytes) of about CHUNK_TARGET_BYTES each; neighbours in the file are joined."""
    target = limits.CHUNK_TARGET_BYTES
    start, held = 0, bytearray()
    for offset, view in sorted(_placed(layout, file, pieces), key=lambda each: each[0]):
        if held and (offset != start + len(held) or len(held) + len(view) > target):
            yield start, bytes(held)
            held = bytearray()
        if not held:
            start = offset
        held += view[: target - len(held)]
        for at in range(target, len(view), target):
            yield start, bytes(held)
            start, held = offset + at, bytearray(view[at : at + target])
    if held:
        yield start, bytes(held)


def _placed(layout: Layout, file: WeightsFile, pieces: Sequence[Piece]) -> Iterator[tuple[int, memoryview]]:
    for piece in pieces:
        if piece.bits.size:
            width = item_bytes(layout.spec(piece.name).dtype)
            offset = len(file.header) + file.data_start(piece.name) + piece.start * width
            yield offset, piece.bits.view(np.uint8).data


def join_anchor_parts(store: Store, layout: Layout, parts: Sequence[AnchorPart]) -> FileRecord:
    """The weights file of all ranks' parts; stores its header.

    Raises:
        UsageError: the parts leave a gap or overlap: an anchor is complete, always.
    """
    file = WeightsFile(layout)
    placed = sorted((each for part in parts for each in part.chunks), key=lambda each: each.offset)
    head = [
        PlacedChunk(at, content_digest(file.header[at : at + limits.CHUNK_TARGET_BYTES]), 0)
        for at in range(0, len(file.header), limits.CHUNK_TARGET_BYTES)
    ]
    refs: list[ChunkRef] = []
    for each in head:
        data = file.header[each.offset : each.offset + limits.CHUNK_TARGET_BYTES]
        store.put(each.digest, data)
        refs.append(ChunkRef(each.digest, len(data)))
    at = len(file.header)
    for each in placed:
        if each.offset != at:
            raise UsageError(f"The parts of the anchor do not meet at byte {at} of {WEIGHTS_FILE}.")
        refs.append(ChunkRef(each.digest, each.nbytes))
        at += each.nbytes
    if at != file.nbytes:
        raise UsageError(f"The anchor has {at} of {file.nbytes} bytes of {WEIGHTS_FILE}.")
    return FileRecord(WEIGHTS_FILE, at, refs)


def write_file(store: Store, name: str, data: bytes) -> FileRecord:
    """Store an auxiliary file. Raises LimitReached, StorageFull."""
    if len(data) > limits.MANIFEST_MAX_BYTES:
        raise LimitReached(f"The file {name!r} of {len(data)} bytes exceeds MANIFEST_MAX_BYTES.")
    refs: list[ChunkRef] = []
    for at in range(0, len(data), limits.CHUNK_TARGET_BYTES):
        part = data[at : at + limits.CHUNK_TARGET_BYTES]
        digest = content_digest(part)
        store.put(digest, part)
        refs.append(ChunkRef(digest, len(part)))
    return FileRecord(name, len(data), refs)


def read_chunks(fetch: Fetch, refs: Sequence[ChunkRef]) -> Iterator[bytes]:
    """The verified bytes of the chunks in order, fetched ANCHOR_BATCH_BYTES at a time.

    Raises:
        MissingChunk: the fetch does not return one. Corrupt: one has other bytes or another size.
    """
    batch: list[ChunkRef] = []
    held = 0
    for ref in [*refs, None]:
        if batch and (ref is None or held + ref.nbytes > ANCHOR_BATCH_BYTES):
            got = fetch(list(dict.fromkeys(each.digest for each in batch)))
            for each in batch:
                yield checked(got, each.digest, each.nbytes)
            batch, held = [], 0
        if ref is not None:
            batch.append(ref)
            held += ref.nbytes


def checked(got: Mapping[str, bytes], digest: str, nbytes: int | None = None) -> bytes:
    """The bytes of `digest` among those that were fetched.

    Raises:
        MissingChunk: they are not there. Corrupt: they have another digest or size.
    """
    data = got.get(digest)
    if data is None:
        raise MissingChunk(f"No source returned chunk {digest}.", digest=digest)
    if content_digest(data) != digest or nbytes not in (None, len(data)):
        raise Corrupt(f"Chunk {digest} does not match its digest.", hint="It is fetched again.", digest=digest)
    return data


def read_file(fetch: Fetch, record: FileRecord) -> bytes:
    """A whole auxiliary file, verified. Raises MissingChunk, Corrupt."""
    if record.nbytes != sum(ref.nbytes for ref in record.chunks) or record.nbytes > limits.MANIFEST_MAX_BYTES:
        raise Corrupt(f"The file {record.name!r} has a size that its chunks do not add up to, or is too large.")
    return b"".join(read_chunks(fetch, record.chunks))


def read_weights(fetch: Fetch, manifest: Manifest) -> tuple[Layout, dict[str, Bits]]:
    """Layout and flat bits of every tensor of an anchor, each chunk verified; the state digest is not checked here.

    Raises:
        Corrupt: the anchor is not complete, or a chunk or the header is not as it must be. MissingChunk.
    """
    layout = layout_from_manifest(manifest.layout)
    record = next((file for file in manifest.files if file.name == WEIGHTS_FILE), None)
    if layout.digest != manifest.layout_digest or layout.elements != manifest.total or record is None:
        raise Corrupt(f"The anchor of version {manifest.version} is not the complete one of its layout.")
    file = WeightsFile(layout)
    if record.nbytes != file.nbytes or sum(ref.nbytes for ref in record.chunks) != file.nbytes:
        raise Corrupt(f"The anchor of version {manifest.version} has {record.nbytes} bytes instead of {file.nbytes}.")
    head = len(file.header)
    header = bytearray()
    data: NDArray[np.uint8] = np.empty(layout.nbytes, np.uint8)
    at = 0
    for part in read_chunks(fetch, record.chunks):
        inside = min(len(part), max(0, head - at))
        header += part[:inside]
        data[at + inside - head : at + len(part) - head] = np.frombuffer(part, np.uint8)[inside:]
        at += len(part)
    if header != file.header:
        raise Corrupt(f"The anchor of version {manifest.version} has another header than its layout.")
    return layout, {spec.name: _view(data, file, spec.name, spec.dtype, spec.elements) for spec in layout.tensors}


def _view(data: NDArray[np.uint8], file: WeightsFile, name: str, dtype: str, elements: int) -> Bits:
    start = file.data_start(name)
    return data[start : start + elements * item_bytes(dtype)].view(bits_dtype(dtype))
