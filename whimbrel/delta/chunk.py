"""The chunk: bytes that carry what changed in some ranges of tensors, decodable on their own.

Layout of the bytes, little-endian: header (magic, mode, operation, width, number of streams, layout digest, elements,
changes, spans), a table of (raw size, stored size) per stream, the streams. A stream is a zstd frame, or plain where
compression gains nothing (stored size = raw size). Stream 0 holds the spans: three int64 columns (tensor, start,
length). Positions count through the spans laid end to end, so that a chunk may cover many small tensors.

    sparse/add   gaps · sign bits · gaps between exceptions · low bytes · high bytes of (|d| - 2) of the exceptions
    sparse/xor   gaps · byte planes of old xor new
    dense/add    byte planes of new - old            dense/set   byte planes of new

d = new - old modulo 2^16 is a bijection on bit patterns: NaN payloads, infinities and -0.0 are nothing special.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
import zstandard
from numpy.typing import NDArray

from whimbrel import limits
from whimbrel.delta.layout import Bits
from whimbrel.errors import Corrupt
from whimbrel.limits import CHUNK_RAW_MAX, CHUNK_SPANS_MAX

MAGIC: Final = b"WHC1"
SPARSE: Final = 0
DENSE: Final = 1
ADD: Final = 0
XOR: Final = 1
SET: Final = 2
STREAMS: Final = {(SPARSE, ADD): 6, (SPARSE, XOR): 3, (DENSE, ADD): 2, (DENSE, SET): 2}
"""Number of streams of each form, the spans included; other forms do not exist."""

_HEADER: Final = struct.Struct("<4sBBBB16sQQI")
_ENTRY: Final = struct.Struct("<II")
_ZSTD_LEVEL: Final = 1
"""Higher levels gain nothing on these streams."""


class ChunkInfo(msgspec.Struct, frozen=True, array_like=True):
    """What a manifest says of a chunk: enough to fetch, check and bound it before any of it is decoded."""

    digest: str
    nbytes: int
    raw_nbytes: int
    """All streams, uncompressed."""
    changed: int
    elements: int
    """Elements of the spans, changed or not."""
    spans: int


class Header(msgspec.Struct, frozen=True):
    """A chunk's header."""

    mode: int
    operation: int
    width: int
    layout: bytes
    elements: int
    changed: int
    spans: int


def pack_chunk(header: Header, streams: Sequence[bytes]) -> tuple[bytes, int]:
    """The chunk's bytes and the raw size of its streams."""
    compressor = zstandard.ZstdCompressor(level=_ZSTD_LEVEL)
    table: list[bytes] = []
    stored: list[bytes] = []
    for raw in streams:
        packed = compressor.compress(raw)
        if len(packed) >= len(raw):
            packed = raw
        table.append(_ENTRY.pack(len(raw), len(packed)))
        stored.append(packed)
    head = _HEADER.pack(
        MAGIC, header.mode, header.operation, header.width, len(streams),
        header.layout, header.elements, header.changed, header.spans,
    )  # fmt: skip
    return b"".join([head, *table, *stored]), sum(len(raw) for raw in streams)


def unpack_chunk(info: ChunkInfo, data: bytes) -> tuple[Header, list[bytes]]:
    """Header and raw streams of hostile bytes; allocates no more than `info.raw_nbytes`.

    Raises:
        Corrupt: the bytes are no chunk, or not the one that `info` describes.
    """
    _require(0 <= info.raw_nbytes <= CHUNK_RAW_MAX, f"claims {info.raw_nbytes} bytes uncompressed")
    _require(0 < info.changed <= info.elements <= limits.CHUNK_MAX_BYTES, f"claims {info.elements} elements")
    _require(len(data) == info.nbytes, f"has {len(data)} bytes where its manifest says {info.nbytes}")
    _require(len(data) >= _HEADER.size, "is shorter than its header")
    magic, mode, operation, width, count, layout, elements, changed, spans = _HEADER.unpack_from(data)
    _require(magic == MAGIC, "does not begin like a chunk")
    _require(STREAMS.get((mode, operation)) == count, f"has the unknown form {mode}/{operation} of {count} streams")
    _require(width in (1, 2, 4, 8) and (mode, operation, width) not in _WRONG_WIDTHS, f"has elements of {width} bytes")
    same = (elements, changed, spans) == (info.elements, info.changed, info.spans)
    _require(same and 0 < spans <= CHUNK_SPANS_MAX, "has other counts than its manifest says")
    _require(elements * width <= limits.CHUNK_MAX_BYTES, f"covers {elements * width} bytes of elements")
    header = Header(mode, operation, width, layout, elements, changed, spans)
    return header, _unpack_streams(info, data, count)


_WRONG_WIDTHS: Final = {(SPARSE, ADD, width) for width in (1, 4, 8)}
"""Sign and magnitude are for 16-bit elements only."""


def _unpack_streams(info: ChunkInfo, data: bytes, count: int) -> list[bytes]:
    at = _HEADER.size + count * _ENTRY.size
    _require(len(data) >= at, "is shorter than its table of streams")
    entries = [_ENTRY.unpack_from(data, _HEADER.size + number * _ENTRY.size) for number in range(count)]
    _require(sum(raw for raw, _ in entries) == info.raw_nbytes, "has other uncompressed sizes than its manifest says")
    _require(at + sum(stored for _, stored in entries) == len(data), "has streams of other sizes than its table says")
    streams: list[bytes] = []
    for raw, stored in entries:
        streams.append(_unpack_stream(data[at : at + stored], raw))
        at += stored
    return streams


def _unpack_stream(stored: bytes, raw: int) -> bytes:
    if len(stored) == raw:
        return stored
    try:
        # The frame's own size is read first: the decompressor would allocate whatever the frame claims.
        _require(zstandard.frame_content_size(stored) == raw, "has a stream of another size than its table says")
        decompressor = zstandard.ZstdDecompressor(max_window_size=limits.CHUNK_MAX_BYTES)
        plain = decompressor.decompress(stored, max_output_size=raw, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise Corrupt(f"A chunk does not decompress: {error}.") from error
    _require(len(plain) == raw, "has a stream of another size than its table says")
    return plain


def packed_size(raw: bytes) -> int:
    """Bytes that a stream takes when stored."""
    return min(len(raw), len(zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(raw)))


def split_planes(values: Bits) -> bytes:
    """All first bytes of the values, then all second bytes, and so on: like compresses with like."""
    width = values.dtype.itemsize
    return np.ascontiguousarray(values.view(np.uint8).reshape(-1, width).T).tobytes()


def join_planes(planes: bytes, count: int, dtype: np.dtype[np.unsignedinteger]) -> Bits:
    """`count` values from their byte planes.

    Raises:
        Corrupt: there are not exactly `count` of them.
    """
    _require(len(planes) == count * dtype.itemsize, "has byte planes of the wrong size")
    lanes: NDArray[np.uint8] = np.frombuffer(planes, np.uint8).reshape(dtype.itemsize, count)
    return np.ascontiguousarray(lanes.T).view(dtype).reshape(count)


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise Corrupt(f"A chunk {what}.", hint="It is fetched again from another source.")
