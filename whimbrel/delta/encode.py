"""From two states of the same tensors to the chunks that say what changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from whimbrel import limits
from whimbrel.delta import chunk, kernels
from whimbrel.delta.chunk import ChunkInfo, Header
from whimbrel.delta.digest import add_digests, seed_at
from whimbrel.delta.layout import Bits, Layout, Piece, check_pieces, content_digest, item_bytes
from whimbrel.errors import UsageError

DENSE_SHARE: Final = 0.25
"""Above this share of changed elements a position costs more than it saves."""

Positions = NDArray[np.int64]


class DeltaPart(msgspec.Struct, frozen=True):
    """What one rank found, to be joined with the other ranks' parts in one manifest."""

    chunks: list[ChunkInfo]
    changed: int
    covered: int
    """Elements that this rank compared; over all ranks they must make up the whole layout."""
    digest_change: int
    """What the state digest gains, modulo 2^64."""


@dataclass(frozen=True, slots=True)
class EncodedChunk:
    """A chunk's bytes and what the manifest will say of them."""

    data: bytes
    info: ChunkInfo


@dataclass(frozen=True, slots=True, eq=False)
class PieceChange:
    """New bits at positions of a piece, counted from the piece's own first element."""

    piece: int
    positions: Positions
    bits: Bits


@dataclass(eq=False)
class EncodedDelta:
    """The chunks of one rank's pieces, and the changes themselves, with which the base advances after the commit."""

    chunks: list[EncodedChunk] = field(default_factory=list[EncodedChunk])
    changes: list[PieceChange] = field(default_factory=list[PieceChange])
    changed: int = 0
    covered: int = 0
    digest_change: int = 0

    @property
    def part(self) -> DeltaPart:
        """What rank 0 needs of it; small, and free of weights."""
        return DeltaPart([each.info for each in self.chunks], self.changed, self.covered, self.digest_change)


@dataclass(frozen=True, slots=True)
class _Segment:
    """A range of a piece inside a window."""

    piece: int
    start: int
    length: int


def encode_delta(
    layout: Layout,
    base: Sequence[Piece],
    new: Sequence[Piece],
    on_chunk: Callable[[EncodedChunk], None] | None = None,
) -> EncodedDelta:
    """Compare bits and encode what differs; nothing is modified.

    Args:
        layout: all tensors of the policy.
        base: the committed state of this rank's pieces.
        new: the same pieces in the same order, with the bits after the step.
        on_chunk: called with each chunk as it is found, so that it can be stored while encoding goes on.

    Raises:
        UsageError: the pieces of base and new are not the same, or do not fit the layout.
    """
    _check_same(layout, base, new)
    result = EncodedDelta(covered=sum(piece.bits.size for piece in new))
    scratch = np.empty(limits.CHUNK_TARGET_BYTES + 1, np.int32)
    digests: list[int] = []
    for segments in _windows(layout, new):
        window = _Window(layout, base, new, segments)
        count = kernels.find_changes(window.old, window.new, *_blocks(window.old, window.new), scratch)
        if count == 0:
            continue
        positions = scratch[:count].astype(np.int64)
        encoded = _encode_window(layout, window, positions)
        for change in window.changes(positions):
            result.changes.append(change)
            digests.append(_change_digest(layout, base, change))
        result.changed += count
        result.chunks.append(encoded)
        if on_chunk is not None:
            on_chunk(encoded)
    result.digest_change = add_digests(digests)
    return result


def advance(base: Sequence[Piece], delta: EncodedDelta) -> None:
    """Overwrite the base in place with what changed: O(changed). Only after the version was committed."""
    for change in delta.changes:
        base[change.piece].bits[change.positions] = change.bits


def _check_same(layout: Layout, base: Sequence[Piece], new: Sequence[Piece]) -> None:
    check_pieces(layout, new)
    if len(base) != len(new):
        raise UsageError(f"The base has {len(base)} pieces and the new state {len(new)}.")
    for old, fresh in zip(base, new, strict=True):
        if (old.name, old.start, old.bits.size) != (fresh.name, fresh.start, fresh.bits.size):
            raise UsageError(f"Base and new state differ in their pieces: {old.name!r} and {fresh.name!r}.")
    check_pieces(layout, base)


def _windows(layout: Layout, pieces: Sequence[Piece]) -> Iterator[list[_Segment]]:
    """Cut large pieces, pack small ones of one width together: about CHUNK_TARGET_BYTES per window."""
    order = sorted(range(len(pieces)), key=lambda i: (layout.index(pieces[i].name), pieces[i].start))
    for width in (1, 2, 4, 8):
        target = limits.CHUNK_TARGET_BYTES // width
        packed: list[_Segment] = []
        room = target
        for number in order:
            piece = pieces[number]
            size = piece.bits.size
            if size == 0 or item_bytes(layout.spec(piece.name).dtype) != width:
                continue
            if size > target // 2:
                yield from ([_Segment(number, at, min(target, size - at))] for at in range(0, size, target))
                continue
            if size > room or len(packed) == chunk.CHUNK_SPANS_MAX:
                yield packed
                packed, room = [], target
            packed.append(_Segment(number, 0, size))
            room -= size
        if packed:
            yield packed


class _Window:
    """Segments of one width laid end to end; positions count through all of them."""

    def __init__(self, layout: Layout, base: Sequence[Piece], new: Sequence[Piece], segments: list[_Segment]) -> None:
        self.segments = segments
        self.pieces = new
        self.tensors = [layout.index(new[each.piece].name) for each in segments]
        self.old = _gather(base, segments)
        self.new = _gather(new, segments)
        lengths = np.array([each.length for each in segments], np.int64)
        self.starts = np.cumsum(lengths) - lengths

    def spans(self) -> bytes:
        """The span table: columns of tensor, flat start, length."""
        starts = [self.pieces[each.piece].start + each.start for each in self.segments]
        return np.array([self.tensors, starts, [each.length for each in self.segments]], "<i8").tobytes()

    def changes(self, positions: Positions) -> Iterator[PieceChange]:
        """The new bits per segment, copied: what a caller does to its tensors later does not reach them."""
        for segment, start, (first, last) in self._parts(positions):
            part = positions[first:last]
            yield PieceChange(segment.piece, part - start + segment.start, self.new[part])

    def without_unchanged(self, positions: Positions) -> tuple[_Window, Positions]:
        """This window reduced to the segments that have a change, and the positions in it."""
        parts = list(self._parts(positions))
        if len(parts) == len(self.segments):
            return self, positions
        kept = object.__new__(_Window)
        kept.segments = [segment for segment, _, _ in parts]
        kept.pieces = self.pieces
        tensor_of = dict(zip((id(each) for each in self.segments), self.tensors, strict=True))
        kept.tensors = [tensor_of[id(each)] for each in kept.segments]
        kept.old = np.concatenate([self.old[s : s + each.length] for each, s, _ in parts])
        kept.new = np.concatenate([self.new[s : s + each.length] for each, s, _ in parts])
        lengths = np.array([each.length for each in kept.segments], np.int64)
        kept.starts = np.cumsum(lengths) - lengths
        moved = [positions[a:b] - s + int(t) for (_, s, (a, b)), t in zip(parts, kept.starts, strict=True)]
        return kept, np.concatenate(moved)

    def _parts(self, positions: Positions) -> Iterator[tuple[_Segment, int, tuple[int, int]]]:
        bounds = [*np.searchsorted(positions, self.starts).tolist(), positions.size]
        for segment, start, first, last in zip(self.segments, self.starts.tolist(), bounds, bounds[1:], strict=False):
            if first < last:
                yield segment, start, (first, last)


def _gather(pieces: Sequence[Piece], segments: list[_Segment]) -> Bits:
    views = [pieces[each.piece].bits[each.start : each.start + each.length] for each in segments]
    if len(views) > 1:
        return np.concatenate(views)
    # The compiled loops read 64 bits at once; an odd address (a shard that begins anywhere) is copied to an even one.
    return views[0] if views[0].ctypes.data % 8 == 0 else views[0].copy()


def _blocks(old: Bits, new: Bits) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    whole = old.size - old.size % (64 // old.dtype.itemsize)
    return old[:whole].view(np.uint64), new[:whole].view(np.uint64)


def _change_digest(layout: Layout, base: Sequence[Piece], change: PieceChange) -> int:
    piece = base[change.piece]
    seed = seed_at(layout.offset(piece.name) + piece.start)
    return int(kernels.digest_change(change.positions, piece.bits[change.positions], change.bits, seed))


def _encode_window(layout: Layout, window: _Window, positions: Positions) -> EncodedChunk:
    dense = positions.size > DENSE_SHARE * window.old.size
    if not dense:
        window, positions = window.without_unchanged(positions)
        dense = positions.size > DENSE_SHARE * window.old.size
    if dense:
        mode, operation, streams = _dense_streams(window.old, window.new)
    else:
        mode, operation, streams = _sparse_streams(window.old[positions], window.new[positions], positions)
    header = Header(
        mode=mode, operation=operation, width=window.old.dtype.itemsize, layout=bytes.fromhex(layout.digest),
        elements=window.old.size, changed=positions.size, spans=len(window.segments),
    )  # fmt: skip
    data, raw_nbytes = chunk.pack_chunk(header, [window.spans(), *streams])
    info = ChunkInfo(content_digest(data), len(data), raw_nbytes, header.changed, header.elements, header.spans)
    return EncodedChunk(data, info)


def _sparse_streams(old: Bits, new: Bits, positions: Positions) -> tuple[int, int, list[bytes]]:
    gaps = _gap_bytes(positions)
    if old.dtype.itemsize != 2:
        return chunk.SPARSE, chunk.XOR, [gaps, chunk.split_planes(old ^ new)]
    difference = new - old
    negative = difference >= np.uint16(0x8000)
    size: NDArray[Any] = np.where(negative, np.uint16(0) - difference, difference)
    exceptions: Positions = np.flatnonzero(size != np.uint16(1)).astype(np.int64)
    beyond = chunk.split_planes((size[exceptions] - np.uint16(2)).astype(np.uint16))
    half = len(beyond) // 2
    signs = np.packbits(negative, bitorder="little").tobytes()
    streams = [gaps, signs, _gap_bytes(exceptions), beyond[:half], beyond[half:]]
    return chunk.SPARSE, chunk.ADD, streams


def _dense_streams(old: Bits, new: Bits) -> tuple[int, int, list[bytes]]:
    """Difference or new bits, whichever compresses better: a fresh initialisation has no use for the old ones."""
    difference, absolute = chunk.split_planes(new - old), chunk.split_planes(new)
    if chunk.packed_size(absolute) < chunk.packed_size(difference):
        return chunk.DENSE, chunk.SET, [absolute]
    return chunk.DENSE, chunk.ADD, [difference]


def _gap_bytes(positions: Positions) -> bytes:
    last = int(positions[-1]) if positions.size else 0
    out = np.empty(positions.size + last // 255 + 1, np.uint8)
    return out[: kernels.write_gaps(positions, out)].tobytes()
