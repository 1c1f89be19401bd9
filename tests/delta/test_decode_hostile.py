"""Decoding treats its input as hostile: `Corrupt` or a checked result, within bounds of memory and time."""

from __future__ import annotations

import struct
import time
import tracemalloc

import msgspec
import numpy as np
import pytest
import zstandard

from whimbrel.delta import (
    ChunkInfo,
    EncodedChunk,
    Layout,
    Piece,
    TensorSpec,
    content_digest,
    decode_chunk,
    encode_delta,
)
from whimbrel.delta import resolve as resolve_chunk
from whimbrel.delta.chunk import Header, pack_chunk, unpack_chunk
from whimbrel.errors import Corrupt

LAYOUT = Layout.of(
    [
        TensorSpec("a", "BF16", (4000,)),
        TensorSpec("b", "F32", (1500,)),
        TensorSpec("c", "U8", (2000,)),
        TensorSpec("d", "BF16", ()),
    ]
)


def chunks_of_all_forms() -> tuple[dict[str, np.ndarray], list[EncodedChunk]]:
    rng = np.random.default_rng(5)
    found: list[EncodedChunk] = []
    base = [
        Piece("a", 0, rng.integers(0, 65536, 4000, dtype=np.uint16)),
        Piece("b", 0, rng.integers(0, 2**32, 1500, dtype=np.uint32)),
        Piece("c", 0, rng.integers(0, 256, 2000, dtype=np.uint8)),
        Piece("d", 0, np.array([1], np.uint16)),
    ]
    for share in (0.01, 0.15, 0.6):
        new = []
        for piece in base:
            bits = piece.bits.copy()
            where = rng.random(bits.size) < share
            bits[where] ^= rng.integers(1, 200, int(where.sum())).astype(bits.dtype)
            new.append(Piece(piece.name, 0, bits))
        found += encode_delta(LAYOUT, base, new).chunks
    zeros = [Piece(p.name, 0, np.zeros_like(p.bits)) for p in base]
    found += encode_delta(LAYOUT, base, zeros).chunks
    return {piece.name: piece.bits for piece in base}, found


def described(chunk: EncodedChunk, data: bytes, **other: int) -> ChunkInfo:
    """What a hostile manifest would say of these bytes."""
    return msgspec.structs.replace(chunk.info, digest=content_digest(data), nbytes=len(data), **other)


def corrupt_or_checked(info: ChunkInfo, data: bytes, base: dict[str, np.ndarray]) -> bool:
    """Whether the bytes were accepted; if they were, everything about the result is within bounds."""
    try:
        decoded = decode_chunk(LAYOUT, info, data)
        changes, _ = resolve_chunk(LAYOUT, decoded, base)
    except Corrupt:
        return False
    for change in changes:
        assert change.positions[0] >= 0
        assert change.positions[-1] < base[change.name].size
        assert (np.diff(change.positions) > 0).all()
        assert change.bits.dtype == base[change.name].dtype
    assert sum(change.positions.size for change in changes) == info.changed
    return True


def test_mutated_bytes_are_corrupt_or_decode_within_bounds() -> None:
    base, chunks = chunks_of_all_forms()
    rng = np.random.default_rng(11)
    started = time.monotonic()
    for _ in range(4000):
        chunk = chunks[rng.integers(len(chunks))]
        data = bytearray(chunk.data)
        match rng.integers(4):
            case 0:
                data[rng.integers(len(data))] ^= 1 << rng.integers(8)
            case 1:
                data[rng.integers(min(len(data), 90))] = rng.integers(256)
            case 2:
                del data[rng.integers(len(data)) :]
            case _:
                at = int(rng.integers(len(data)))
                data[at : at + 4] = rng.bytes(4)
        corrupt_or_checked(described(chunk, bytes(data)), bytes(data), base)
    assert time.monotonic() - started < 30


def test_mutated_streams_behind_valid_frames_are_corrupt_or_decode_within_bounds() -> None:
    """Mutations that the compression's own checks cannot see."""
    base, chunks = chunks_of_all_forms()
    rng = np.random.default_rng(12)
    accepted = refused = 0
    for _ in range(4000):
        chunk = chunks[rng.integers(len(chunks))]
        header, streams = unpack_chunk(chunk.info, chunk.data)
        target = int(rng.integers(len(streams)))
        stream = bytearray(streams[target])
        if stream and rng.integers(4):
            stream[rng.integers(len(stream))] = rng.choice([0, 1, 127, 128, 254, 255, rng.integers(256)])
        elif stream and rng.integers(2):
            del stream[rng.integers(len(stream)) :]
        else:
            stream += rng.bytes(int(rng.integers(1, 20)))
        streams[target] = bytes(stream)
        data, raw = pack_chunk(header, streams)
        if corrupt_or_checked(described(chunk, data, raw_nbytes=raw), data, base):
            accepted += 1
        else:
            refused += 1
    assert accepted
    assert refused


def test_wrong_counts_in_the_manifest_are_corrupt() -> None:
    _, chunks = chunks_of_all_forms()
    for chunk in chunks:
        for field in ("nbytes", "raw_nbytes", "changed", "elements", "spans"):
            for value in (0, -1, getattr(chunk.info, field) + 1, 2**62):
                info = msgspec.structs.replace(chunk.info, **{field: value})
                with pytest.raises(Corrupt):
                    decode_chunk(LAYOUT, info, chunk.data)


def test_a_decompression_bomb_is_refused_before_it_is_allocated() -> None:
    _, chunks = chunks_of_all_forms()
    chunk = chunks[0]
    header, streams = unpack_chunk(chunk.info, chunk.data)
    bomb = zstandard.ZstdCompressor(level=3).compress(bytes(512 * 2**20))
    entries = [(len(s), len(s)) for s in streams]
    entries[1] = (len(streams[1]), len(bomb))
    streams[1] = bomb
    plain, _ = pack_chunk(header, [])
    head = bytearray(plain)
    head[7] = len(streams)
    data = bytes(head) + b"".join(struct.pack("<II", *each) for each in entries) + b"".join(streams)
    tracemalloc.start()
    with pytest.raises(Corrupt):
        decode_chunk(LAYOUT, described(chunk, data), data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20


@pytest.mark.parametrize(
    "span",
    [(0, 3999, 2), (0, -1, 10), (0, 0, 0), (0, 2**62, 2**62), (4, 0, 10), (-1, 0, 10), (1, 0, 10), (0, 0, 4001)],
)
def test_ranges_outside_their_tensor_are_corrupt(span: tuple[int, int, int]) -> None:
    elements = max(span[2], 1) if span[2] < 10**6 else 10
    header = Header(0, 0, 2, bytes.fromhex(LAYOUT.digest), elements, 1, 1)
    streams = [np.array(span, "<i8").tobytes(), b"\0", b"\0", b"", b"", b""]
    data, raw = pack_chunk(header, streams)
    info = ChunkInfo(content_digest(data), len(data), raw, 1, elements, 1)
    with pytest.raises(Corrupt):
        decode_chunk(LAYOUT, info, data)


@pytest.mark.parametrize("spans", [[(0, 0, 5), (0, 4, 5)], [(0, 5, 5), (0, 0, 5)], [(3, 0, 1), (0, 0, 9)]])
def test_overlapping_or_unordered_ranges_are_corrupt(spans: list[tuple[int, int, int]]) -> None:
    header = Header(0, 0, 2, bytes.fromhex(LAYOUT.digest), 10, 1, 2)
    data, raw = pack_chunk(header, [np.array(spans, "<i8").T.tobytes(), b"\0", b"\0", b"", b"", b""])
    with pytest.raises(Corrupt, match=r"overlap|order"):
        decode_chunk(LAYOUT, ChunkInfo(content_digest(data), len(data), raw, 1, 10, 2), data)


def test_a_chunk_of_another_layout_is_corrupt() -> None:
    _, chunks = chunks_of_all_forms()
    other = Layout.of([*LAYOUT.tensors, TensorSpec("e", "BF16", (1,))])
    with pytest.raises(Corrupt, match="layout"):
        decode_chunk(other, chunks[0].info, chunks[0].data)
