"""What a policy consists of: named tensors with dtype and shape, and the bits that a process holds of them.

Bits are unsigned integers of the dtype's width; their values are never interpreted. A flat position counts a
tensor's elements in row-major order of its full shape; a global position adds the sizes of the tensors before it.
Both are Python ints or int64: stacked experts pass 2^31 elements.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from whimbrel.errors import Corrupt, NotFound, UsageError
from whimbrel.limits import LAYOUT_ELEMENTS_MAX

Bits = NDArray[Any]
"""1-D array of uint8, uint16, uint32 or uint64."""

ITEM_BYTES: Final = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "BF16": 2, "F16": 2, "I16": 2, "U16": 2,
    "F32": 4, "I32": 4, "U32": 4,
    "F64": 8, "I64": 8, "U64": 8,
}  # fmt: skip
"""Bytes of one element, by the dtype names of safetensors."""

_BITS: Final = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16), 4: np.dtype(np.uint32), 8: np.dtype(np.uint64)}


def content_digest(data: bytes | bytearray | memoryview) -> str:
    """BLAKE2b-128 of bytes as 32 hex digits: the name of a chunk or manifest."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def item_bytes(dtype: str) -> int:
    """Bytes of one element of a safetensors dtype.

    Raises:
        UsageError: the dtype is none that the log can carry.
    """
    if dtype not in ITEM_BYTES:
        raise UsageError(
            f"The weight log cannot carry tensors of dtype {dtype!r}.", hint=f"It knows {list(ITEM_BYTES)}."
        )
    return ITEM_BYTES[dtype]


def bits_dtype(dtype: str) -> np.dtype[Any]:
    """The unsigned numpy dtype that holds the bits of a safetensors dtype.

    Raises:
        UsageError: the dtype is none that the log can carry.
    """
    return _BITS[item_bytes(dtype)]


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """A tensor of the policy, in the names of the Hugging Face checkpoint; a tied tensor appears once."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements; 1 for a 0-d tensor."""
        return math.prod(self.shape)


class Layout:
    """All tensors of a policy in canonical order (by name). Two states can be compared only under one layout."""

    def __init__(self, tensors: tuple[TensorSpec, ...]) -> None:
        self.tensors = tensors
        self._index = {spec.name: number for number, spec in enumerate(tensors)}
        self.offsets: list[int] = []
        total, nbytes = 0, 0
        for spec in tensors:
            if any(size < 0 for size in spec.shape):
                raise UsageError(f"Tensor {spec.name!r} has a negative size in its shape {spec.shape}.")
            self.offsets.append(total)
            total += spec.elements
            nbytes += spec.elements * item_bytes(spec.dtype)
        if total > LAYOUT_ELEMENTS_MAX:
            raise UsageError(f"The layout has {total} elements; the log addresses at most {LAYOUT_ELEMENTS_MAX}.")
        if len(self._index) != len(tensors) or list(self._index) != sorted(self._index):
            raise UsageError("A layout's tensors must have distinct names in sorted order.")
        self.elements = total
        self.nbytes = nbytes

    @classmethod
    def of(cls, specs: Iterable[TensorSpec]) -> Layout:
        """The layout of these tensors, in any order.

        Raises:
            UsageError: a name occurs twice, or a dtype or shape cannot be carried.
        """
        return cls(tuple(sorted(specs, key=lambda spec: spec.name)))

    @cached_property
    def digest(self) -> str:
        """Identity of the layout: names, dtypes and shapes."""
        return content_digest(msgspec.msgpack.encode(self.tensors))

    def index(self, name: str) -> int:
        """The tensor's place in canonical order.

        Raises:
            NotFound: no tensor has this name.
        """
        if name not in self._index:
            raise NotFound(f"The layout has no tensor {name!r}.")
        return self._index[name]

    def spec(self, name: str) -> TensorSpec:
        """The tensor of this name; NotFound if there is none."""
        return self.tensors[self.index(name)]

    def offset(self, name: str) -> int:
        """Global position of the tensor's first element; NotFound if there is no such tensor."""
        return self.offsets[self.index(name)]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self.tensors == other.tensors

    def __hash__(self) -> int:
        return hash(self.digest)


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """The bits of a contiguous flat range [start, start + len(bits)) of a tensor: the whole, or one rank's shard."""

    name: str
    start: int
    bits: Bits


def check_pieces(layout: Layout, pieces: Sequence[Piece]) -> None:
    """Refuse pieces that are not what the layout says, or that overlap.

    Raises:
        NotFound: a piece names an unknown tensor.
        UsageError: wrong dtype, not contiguous, out of range, or two pieces overlap.
    """
    ends: dict[str, list[tuple[int, int]]] = {}
    for piece in pieces:
        spec = layout.spec(piece.name)
        bits = piece.bits
        if bits.dtype != bits_dtype(spec.dtype) or bits.ndim != 1 or not bits.flags.c_contiguous:
            raise UsageError(
                f"The bits of {piece.name!r} must be a contiguous 1-D array of {bits_dtype(spec.dtype)}, "
                f"not {bits.ndim}-D {bits.dtype}."
            )
        if piece.start < 0 or piece.start + bits.size > spec.elements:
            raise UsageError(
                f"A piece of {piece.name!r} covers [{piece.start}, {piece.start + bits.size}) of {spec.elements} elements."
            )
        if bits.size:
            ends.setdefault(piece.name, []).append((piece.start, piece.start + bits.size))
    for name, ranges in ends.items():
        ranges.sort()
        for (_, stop), (start, _) in itertools.pairwise(ranges):
            if start < stop:
                raise UsageError(f"Two pieces of {name!r} overlap at element {start}.")


def layout_from_manifest(tensors: Sequence[TensorSpec]) -> Layout:
    """A layout that came over the wire.

    Raises:
        Corrupt: it is no valid layout.
    """
    try:
        return Layout(tuple(tensors))
    except UsageError as error:
        raise Corrupt(f"The layout in the log is not valid: {error.message}") from error
