"""The codec: from arrays of bits to chunks and back, lossless, with a state digest. Bytes and arrays only, no I/O."""

from whimbrel.delta.chunk import ChunkInfo
from whimbrel.delta.decode import Change, DecodedChunk, decode_chunk, resolve
from whimbrel.delta.digest import add_digests, array_digest, digest_hex, state_digest
from whimbrel.delta.encode import DeltaPart, EncodedChunk, EncodedDelta, advance, encode_delta
from whimbrel.delta.layout import (
    Bits,
    Layout,
    Piece,
    TensorSpec,
    bits_dtype,
    check_pieces,
    content_digest,
    item_bytes,
    layout_from_manifest,
)

__all__ = [
    "Bits",
    "Change",
    "ChunkInfo",
    "DecodedChunk",
    "DeltaPart",
    "EncodedChunk",
    "EncodedDelta",
    "Layout",
    "Piece",
    "TensorSpec",
    "add_digests",
    "advance",
    "array_digest",
    "bits_dtype",
    "check_pieces",
    "content_digest",
    "decode_chunk",
    "digest_hex",
    "encode_delta",
    "item_bytes",
    "layout_from_manifest",
    "resolve",
    "state_digest",
]
