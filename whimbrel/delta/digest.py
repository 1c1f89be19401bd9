"""The state digest: D(state) = sum over elements of mix(position, bits) mod 2^64.

It is additive, so shards add up in any order, and a change of k elements updates it in O(k). It guards against faults,
not against an adversary; the content digests of chunks and manifests do that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Final

import numpy as np

from whimbrel.delta import kernels
from whimbrel.delta.layout import Bits, Layout, Piece

_MASK: Final = 2**64 - 1
_ORIGIN: Final = 0x5851F42D4C957F2D
"""Keeps a zero at position zero from contributing nothing."""


def seed_at(position: int, origin: int = _ORIGIN) -> np.uint64:
    """What stands for a global position in the mix; any non-negative int, beyond 2^31 and 2^64 alike."""
    return np.uint64((origin + position * kernels.POSITION_FACTOR) & _MASK)


def state_digest(layout: Layout, pieces: Iterable[Piece]) -> int:
    """Digest of these pieces of a state; those of disjoint pieces add up modulo 2^64 to the digest of the whole.

    Raises:
        NotFound: a piece names a tensor that the layout does not have.
    """
    total = 0
    for piece in pieces:
        total += int(kernels.digest_dense(piece.bits, seed_at(layout.offset(piece.name) + piece.start)))
    return total & _MASK


def array_digest(key: str, dtype: str, start: int, bits: Bits) -> int:
    """Digest of the flat range [start, …) of a named array outside any layout, e.g. an optimizer moment. Additive too."""
    origin = int.from_bytes(hashlib.blake2b(f"{key}\0{dtype}".encode(), digest_size=8).digest(), "little")
    return int(kernels.digest_dense(bits, seed_at(start, origin)))


def add_digests(digests: Iterable[int]) -> int:
    """Sum modulo 2^64."""
    return sum(digests) & _MASK


def digest_hex(digest: int) -> str:
    """16 hex digits."""
    return f"{digest & _MASK:016x}"
