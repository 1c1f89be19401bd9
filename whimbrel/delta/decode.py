"""From hostile bytes to changes. Nothing here modifies a state; everything is checked before it is returned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whimbrel.delta import chunk, kernels
from whimbrel.delta.chunk import ChunkInfo, Header
from whimbrel.delta.digest import add_digests, seed_at
from whimbrel.delta.layout import Bits, Layout, bits_dtype, content_digest, item_bytes
from whimbrel.errors import Corrupt


@dataclass(frozen=True, slots=True)
class Span:
    """A flat range of a tensor; `tensor` is its number in the layout."""

    tensor: int
    start: int
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """New absolute bits at flat positions (int64, strictly increasing, in range) of a tensor."""

    name: str
    positions: NDArray[np.int64]
    bits: Bits


@dataclass(frozen=True, slots=True, eq=False)
class DecodedChunk:
    """A chunk's content: `operand` combines with the base's bits by `operation`, at `positions` of the spans laid end
    to end (None: at every element)."""

    info: ChunkInfo
    spans: list[Span]
    operation: int
    positions: NDArray[np.int64] | None
    operand: Bits


def decode_chunk(layout: Layout, info: ChunkInfo, data: bytes) -> DecodedChunk:
    """Decode and check one chunk; allocates no more than a small multiple of what `info` and the limits allow.

    Raises:
        Corrupt: wrong digest, other counts or sizes than `info` says, another layout, ranges or positions out of
            bounds or out of order, or streams that do not decode exactly.
    """
    if content_digest(data) != info.digest:
        raise Corrupt(
            f"Chunk {info.digest} does not match its digest.", hint="It is fetched again from another source."
        )
    header, streams = chunk.unpack_chunk(info, data)
    if header.layout.hex() != layout.digest:
        raise Corrupt(f"Chunk {info.digest} was made for another layout of tensors.")
    spans = _read_spans(layout, header, streams[0])
    dtype = np.dtype(f"u{header.width}")
    if header.mode == chunk.DENSE:
        return DecodedChunk(info, spans, header.operation, None, chunk.join_planes(streams[1], header.elements, dtype))
    positions = _read_positions(streams[1], header.changed, header.elements)
    if header.operation == chunk.XOR:
        operand = chunk.join_planes(streams[2], header.changed, dtype)
    else:
        operand = _read_differences(header.changed, streams[2:])
    if not operand.all():
        raise Corrupt("A chunk lists an element as changed that does not change.")
    return DecodedChunk(info, spans, header.operation, positions, operand)


def resolve(layout: Layout, decoded: DecodedChunk, base: Mapping[str, Bits]) -> tuple[list[Change], int]:
    """The changes against `base` (flat bits of whole tensors), and what they add to the state digest.

    Raises:
        Corrupt: against this base another number of elements changes than the chunk says.
    """
    changes: list[Change] = []
    digests: list[int] = []
    for name, positions, old, new in _changed_bits(layout, decoded, base):
        if positions.size:
            changes.append(Change(name, positions, new))
            digests.append(int(kernels.digest_change(positions, old, new, seed_at(layout.offset(name)))))
    changed = sum(change.positions.size for change in changes)
    if changed != decoded.info.changed:
        raise Corrupt(f"A chunk changes {changed} elements where its manifest says {decoded.info.changed}.")
    return changes, add_digests(digests)


def _read_spans(layout: Layout, header: Header, stream: bytes) -> list[Span]:
    if len(stream) != 24 * header.spans:
        raise Corrupt("A chunk's table of spans has the wrong size.")
    tensors, starts, lengths = np.frombuffer(stream, "<i8").reshape(3, header.spans).tolist()
    spans = [Span(*row) for row in zip(tensors, starts, lengths, strict=True)]
    total = 0
    end = (-1, 0)
    for span in spans:
        if not 0 <= span.tensor < len(layout.tensors):
            raise Corrupt(f"A chunk names tensor {span.tensor} of {len(layout.tensors)}.")
        spec = layout.tensors[span.tensor]
        inside = span.start >= 0 and span.length > 0 and span.start + span.length <= spec.elements
        if not inside or item_bytes(spec.dtype) != header.width:
            raise Corrupt(f"A chunk's range [{span.start}, +{span.length}) does not fit tensor {spec.name!r}.")
        if (span.tensor, span.start) < end:
            raise Corrupt("A chunk's ranges overlap or are out of order.")
        end = (span.tensor, span.start + span.length)
        total += span.length
    if total != header.elements:
        raise Corrupt("A chunk's ranges do not add up to its elements.")
    return spans


def _read_positions(gaps: bytes, count: int, limit: int) -> NDArray[np.int64]:
    # Each position has at least one byte of its own: a count beyond the bytes is refused before it is allocated.
    if count > len(gaps):
        raise Corrupt("A chunk has fewer gaps than positions.")
    positions = np.empty(count, np.int64)
    status = kernels.read_gaps(np.frombuffer(gaps, np.uint8), limit, positions)
    if status != kernels.OK:
        reason = {kernels.TRUNCATED: "end early", kernels.OUT_OF_RANGE: "pass the end of its ranges"}
        raise Corrupt(f"A chunk's positions {reason.get(status, 'are followed by other bytes')}.")
    return positions


def _read_differences(count: int, streams: list[bytes]) -> NDArray[np.uint16]:
    signs, gaps, low, high = streams
    if len(signs) != (count + 7) // 8 or len(low) != len(high) or len(low) > count:
        raise Corrupt("A chunk's difference streams have the wrong sizes.")
    exceptions = _read_positions(gaps, len(low), count)
    beyond = chunk.join_planes(low + high, len(low), np.dtype(np.uint16))
    if beyond.size and int(beyond.max()) > 0x7FFE:
        raise Corrupt("A chunk has a difference beyond 16 bits.")
    size = np.ones(count, np.uint16)
    size[exceptions] = beyond + np.uint16(2)
    negative = np.unpackbits(np.frombuffer(signs, np.uint8), count=count, bitorder="little").astype(np.bool_)
    difference: NDArray[Any] = np.where(negative, np.uint16(0) - size, size)
    return difference


def _changed_bits(
    layout: Layout, decoded: DecodedChunk, base: Mapping[str, Bits]
) -> Iterator[tuple[str, NDArray[np.int64], Bits, Bits]]:
    """Per span: name, flat positions, old bits, new bits."""
    at = 0
    for span in decoded.spans:
        spec = layout.tensors[span.tensor]
        bits = base[spec.name]
        if bits.size != spec.elements or bits.dtype != bits_dtype(spec.dtype):
            raise Corrupt(
                f"The base holds {bits.size} elements of {spec.name!r} where the layout says {spec.elements}."
            )
        if decoded.positions is None:
            old = bits[span.start : span.start + span.length]
            new = _combine(decoded.operation, old, decoded.operand[at : at + span.length])
            local = np.flatnonzero(old != new).astype(np.int64)
            yield spec.name, local + span.start, old[local], new[local]
        else:
            first, last = np.searchsorted(decoded.positions, (at, at + span.length)).tolist()
            flat = decoded.positions[first:last] - at + span.start
            old = bits[flat]
            yield spec.name, flat, old, _combine(decoded.operation, old, decoded.operand[first:last])
        at += span.length


def _combine(operation: int, old: Bits, operand: Bits) -> Bits:
    if operation == chunk.ADD:
        return old + operand
    if operation == chunk.XOR:
        return old ^ operand
    return operand
