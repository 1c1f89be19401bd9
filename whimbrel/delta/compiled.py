"""Loops over elements, compiled by numba. No allocation beyond what is returned, no exception inside a loop: status codes.

Signed and unsigned 64-bit integers are never mixed in an expression: numba would make it a float.
"""
# pyright: basic

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

from whimbrel.delta.layout import Bits

Function = TypeVar("Function", bound=Callable[..., Any])

OK: Final = 0
TRUNCATED: Final = 1
OUT_OF_RANGE: Final = 2
TRAILING: Final = 3

POSITION_FACTOR: Final = 0x9E3779B97F4A7C15
"""Odd constants that spread positions and bits over 64 bits before the finaliser (splitmix64, Steele et al. 2014)."""
BITS_FACTOR: Final = 0xD6E8FEB86659FD93
_POSITION = np.uint64(POSITION_FACTOR)
_BITS = np.uint64(BITS_FACTOR)
_MUL1 = np.uint64(0xBF58476D1CE4E5B9)
_MUL2 = np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)


def kernel(function: Function) -> Function:
    """Compile on first use, cache on disk, release the GIL while running; the Python type is kept."""
    try:
        compiled = numba.njit(cache=True, nogil=True, boundscheck=False)(function)
    except RuntimeError:
        # Neither the package's folder nor the user's cache can be written: each process compiles for itself.
        compiled = numba.njit(nogil=True, boundscheck=False)(function)
    return cast("Function", compiled)


@kernel
def _finalise(x):
    x = (x ^ (x >> _S30)) * _MUL1
    x = (x ^ (x >> _S27)) * _MUL2
    return x ^ (x >> _S31)


@kernel
def digest_dense(bits: Bits, seed: np.uint64) -> np.uint64:
    """Sum of the mixes of all elements; `seed` stands for the position of the first one."""
    total = np.uint64(0)
    x = seed
    for i in range(bits.size):
        total += _finalise(x + np.uint64(bits[i]) * _BITS)
        x += _POSITION
    return total


@kernel
def digest_change(positions: NDArray[np.int64], old: Bits, new: Bits, seed: np.uint64) -> np.uint64:
    """What the digest of a tensor gains when `old` becomes `new` at these flat positions; `seed` as for position 0."""
    total = np.uint64(0)
    for i in range(positions.size):
        x = seed + np.uint64(positions[i]) * _POSITION
        total += _finalise(x + np.uint64(new[i]) * _BITS) - _finalise(x + np.uint64(old[i]) * _BITS)
    return total


@kernel
def find_changes(old: Bits, new: Bits, old64: Bits, new64: Bits, out: NDArray[np.int32]) -> int:
    """Write the positions at which `old` and `new` differ into `out` (one longer than they are); return their number.

    `old64` and `new64` view the leading whole 64-byte blocks: one comparison passes over 64 bytes.
    """
    count = 0
    lanes = 8 // old.itemsize
    blocks = old64.size // 8
    for block in range(blocks):
        a = old64[block * 8 : block * 8 + 8]
        b = new64[block * 8 : block * 8 + 8]
        differs = np.uint64(0)
        for i in range(8):
            differs |= a[i] ^ b[i]
        if differs != np.uint64(0):
            for i in range(8):
                if a[i] != b[i]:
                    first = (block * 8 + i) * lanes
                    for p in range(first, first + lanes):
                        out[count] = p
                        count += old[p] != new[p]
    for p in range(blocks * 8 * lanes, old.size):
        out[count] = p
        count += old[p] != new[p]
    return count


@kernel
def write_gaps(positions: NDArray[Any], out: NDArray[np.uint8]) -> int:
    """Gaps between strictly increasing positions, 255 meaning "255 more and another byte"; returns the bytes written."""
    at = 0
    previous = np.int64(-1)
    for i in range(positions.size):
        gap = np.int64(positions[i]) - previous - 1
        previous = np.int64(positions[i])
        while gap >= 255:
            out[at] = 255
            at += 1
            gap -= 255
        out[at] = gap
        at += 1
    return at


@kernel
def read_gaps(gaps: NDArray[np.uint8], limit: int, out: NDArray[np.int64]) -> int:
    """Fill `out` with strictly increasing positions below `limit`; returns a status code."""
    at = 0
    previous = np.int64(-1)
    for i in range(out.size):
        gap = np.int64(0)
        while True:
            if at >= gaps.size:
                return TRUNCATED
            step = np.int64(gaps[at])
            at += 1
            gap += step
            if step != 255:
                break
        previous = previous + 1 + gap
        if previous >= limit:
            return OUT_OF_RANGE
        out[i] = previous
    if at != gaps.size:
        return TRAILING
    return OK
