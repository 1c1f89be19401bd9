"""Whatever two states are, the delta between them reproduces every bit (law 2)."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whimbrel import limits
from whimbrel.delta import (
    EncodedDelta,
    Layout,
    Piece,
    TensorSpec,
    add_digests,
    advance,
    bits_dtype,
    decode_chunk,
    encode_delta,
    resolve,
    state_digest,
)
from whimbrel.delta.layout import ITEM_BYTES
from whimbrel.errors import UsageError

SPECIAL = {
    1: [0x00, 0x80, 0x7F, 0xFF],
    2: [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x7FFF],
    4: [0x0, 0x80000000, 0x7F800000, 0x7FC00001, 0xFFFFFFFF],
    8: [0x0, 2**63, 0x7FF0000000000000, 2**64 - 1],
}
"""Zero, minus zero, infinities, NaN payloads, all ones."""


def random_bits(rng: np.random.Generator, dtype: str, count: int) -> np.ndarray:
    width = ITEM_BYTES[dtype]
    bits = rng.integers(0, 2 ** (8 * width), count, dtype=np.uint64).astype(bits_dtype(dtype))
    special = rng.random(count) < 0.2
    bits[special] = rng.choice(np.array(SPECIAL[width], np.uint64), int(special.sum())).astype(bits.dtype)
    return bits


def changed_bits(rng: np.random.Generator, bits: np.ndarray, dtype: str, share: float) -> np.ndarray:
    new = bits.copy()
    near, far = rng.random(bits.size) < share, rng.random(bits.size) < share / 4
    new[near] += np.array(1, bits.dtype)
    new[far] = random_bits(rng, dtype, int(far.sum()))
    return new


def apply(layout: Layout, base: list[Piece], delta: EncodedDelta) -> dict[str, np.ndarray]:
    held = {spec.name: np.zeros(spec.elements, bits_dtype(spec.dtype)) for spec in layout.tensors}
    for piece in base:
        held[piece.name][piece.start : piece.start + piece.bits.size] = piece.bits
    gained, seen = [], []
    for chunk in delta.chunks:
        changes, gain = resolve(layout, decode_chunk(layout, chunk.info, chunk.data), held)
        gained.append(gain)
        seen += changes
    assert add_digests(gained) == delta.digest_change
    for change in seen:
        held[change.name][change.positions] = change.bits
    return held


def cut(piece: Piece, at: list[int]) -> list[Piece]:
    bounds = [0, *sorted({min(each, piece.bits.size) for each in at}), piece.bits.size]
    return [Piece(piece.name, piece.start + a, piece.bits[a:b].copy()) for a, b in itertools.pairwise(bounds)]


states = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**32 - 1),
        "share": st.sampled_from([0.0, 0.001, 0.02, 0.2, 0.5, 1.0]),
        "tensors": st.lists(
            st.tuples(
                st.sampled_from(sorted(ITEM_BYTES)), st.sampled_from([(), (0, 3), (1,), (7, 9), (300,), (64, 65)])
            ),
            min_size=1,
            max_size=8,
        ),
        "cuts": st.lists(st.integers(0, 4000), max_size=3),
    }
)


@given(states)
@settings(max_examples=60, deadline=None)
def test_law_2_every_bit_survives_in_every_dtype_and_shards_agree_with_the_whole(state: dict) -> None:
    rng = np.random.default_rng(state["seed"])
    layout = Layout.of(TensorSpec(f"t{i}", dtype, shape) for i, (dtype, shape) in enumerate(state["tensors"]))
    base = [Piece(s.name, 0, random_bits(rng, s.dtype, s.elements)) for s in layout.tensors]
    new = [Piece(p.name, 0, changed_bits(rng, p.bits, layout.spec(p.name).dtype, state["share"])) for p in base]
    before = [piece.bits.copy() for piece in base]

    delta = encode_delta(layout, base, new)
    assert all(np.array_equal(a, p.bits) for a, p in zip(before, base, strict=True)), "encoding must not touch the base"
    held = apply(layout, base, delta)
    assert all(np.array_equal(held[piece.name], piece.bits) for piece in new)
    assert delta.changed == sum(int((a.bits != b.bits).sum()) for a, b in zip(base, new, strict=True))
    assert delta.covered == layout.elements
    assert add_digests([state_digest(layout, base), delta.digest_change]) == state_digest(layout, new)

    parts = [
        encode_delta(layout, old, fresh)
        for old, fresh in zip(
            zip(*[_ranks(p, state["cuts"]) for p in base], strict=True),
            zip(*[_ranks(p, state["cuts"]) for p in new], strict=True),
            strict=True,
        )
    ]
    assert add_digests(part.digest_change for part in parts) == delta.digest_change
    joined = EncodedDelta(chunks=[c for part in parts for c in part.chunks], digest_change=delta.digest_change)
    held = apply(layout, base, joined)
    assert all(np.array_equal(held[piece.name], piece.bits) for piece in new)

    advance(base, delta)
    assert all(np.array_equal(a.bits, b.bits) for a, b in zip(base, new, strict=True))


def _ranks(piece: Piece, cuts: list[int]) -> list[Piece]:
    pieces = cut(piece, cuts)
    return pieces + [Piece(piece.name, 0, piece.bits[:0])] * (5 - len(pieces))


def test_law_2_all_pairs_of_bit_patterns_that_differ_by_any_amount() -> None:
    old = np.tile(np.arange(65536, dtype=np.uint16), 16)
    steps = np.repeat(
        np.array([0, 1, 2, 3, 255, 256, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0, 0, 0, 0, 0, 0], np.uint16), 65536
    )
    layout = Layout.of([TensorSpec("w", "BF16", old.shape)])
    # Once as it is (dense), once with the changes thinned out (sparse).
    for thin in (1, 29):
        new = np.where(np.arange(old.size) % thin == 0, old + steps, old)
        delta = encode_delta(layout, [Piece("w", 0, old)], [Piece("w", 0, new)])
        assert np.array_equal(apply(layout, [Piece("w", 0, old)], delta)["w"], new)


def test_minus_zero_and_nan_payloads_are_changes() -> None:
    old = np.array([0x0000, 0x7FC0, 0x7FC0, 0x3F80], np.uint16)
    new = np.array([0x8000, 0x7FC1, 0x7FC0, 0x3F80], np.uint16)
    layout = Layout.of([TensorSpec("w", "BF16", (4,))])
    delta = encode_delta(layout, [Piece("w", 0, old)], [Piece("w", 0, new)])
    assert delta.changed == 2
    assert np.array_equal(apply(layout, [Piece("w", 0, old)], delta)["w"], new)


def test_nothing_changed_writes_nothing() -> None:
    layout = Layout.of([TensorSpec("w", "BF16", (1000,))])
    bits = np.arange(1000, dtype=np.uint16)
    delta = encode_delta(layout, [Piece("w", 0, bits)], [Piece("w", 0, bits.copy())])
    assert (delta.chunks, delta.changed, delta.digest_change) == ([], 0, 0)


def test_thousands_of_tiny_tensors_share_chunks() -> None:
    layout = Layout.of(TensorSpec(f"t{i:06d}", "BF16", (3,)) for i in range(20_000))
    base = [Piece(s.name, 0, np.zeros(3, np.uint16)) for s in layout.tensors]
    new = [Piece(p.name, 0, p.bits + np.uint16(i % 100 == 0)) for i, p in enumerate(base)]
    delta = encode_delta(layout, base, new)
    assert delta.changed == 600
    assert len(delta.chunks) == 1
    assert delta.chunks[0].info.spans == 200, "unchanged tensors are not named"
    assert np.array_equal(apply(layout, base, delta)["t000100"], [1, 1, 1])


def test_large_tensors_are_cut_into_chunks_of_bounded_size_as_they_are_found() -> None:
    count = limits.CHUNK_TARGET_BYTES + 77
    layout = Layout.of([TensorSpec("w", "BF16", (count,))])
    old = np.zeros(count, np.uint16)
    new = old.copy()
    new[::100] = new[-1] = 1
    found: list[int] = []
    delta = encode_delta(layout, [Piece("w", 0, old)], [Piece("w", 0, new)], lambda c: found.append(c.info.elements))
    assert found == [limits.CHUNK_TARGET_BYTES // 2, limits.CHUNK_TARGET_BYTES // 2, 77]
    assert np.array_equal(apply(layout, [Piece("w", 0, old)], delta)["w"], new)


def test_a_percent_of_small_steps_costs_about_a_byte_each() -> None:
    rng = np.random.default_rng(3)
    old = rng.integers(0, 65536, 1_000_000, dtype=np.uint16)
    new = old.copy()
    where = rng.random(old.size) < 0.01
    new[where] += rng.choice(np.array([1, 65535], np.uint16), int(where.sum()))
    layout = Layout.of([TensorSpec("w", "BF16", old.shape)])
    delta = encode_delta(layout, [Piece("w", 0, old)], [Piece("w", 0, new)])
    assert sum(len(chunk.data) for chunk in delta.chunks) < 1.3 * delta.changed


def test_positions_beyond_2_31_and_2_32_are_exact() -> None:
    layout = Layout.of([TensorSpec("a", "BF16", (2**33,)), TensorSpec("experts", "BF16", (2**34,))])
    start = 2**33 + 12_345
    old = np.zeros(500, np.uint16)
    new = old.copy()
    new[[3, 499]] = 7
    delta = encode_delta(layout, [Piece("experts", start, old)], [Piece("experts", start, new)])
    decoded = decode_chunk(layout, delta.chunks[0].info, delta.chunks[0].data)
    assert [(s.tensor, s.start, s.length) for s in decoded.spans] == [(1, start, 500)]
    assert decoded.positions is not None
    assert decoded.positions.tolist() == [3, 499]
    assert delta.digest_change == (reference_digest(2**33 + start, new) - reference_digest(2**33 + start, old)) % 2**64


def reference_digest(first: int, bits: np.ndarray) -> int:
    """The digest in Python integers."""
    mask, total = 2**64 - 1, 0
    for i, value in enumerate(bits.tolist()):
        x = (0x5851F42D4C957F2D + (first + i) * 0x9E3779B97F4A7C15 + value * 0xD6E8FEB86659FD93) & mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        total += x ^ (x >> 31)
    return total & mask


@pytest.mark.parametrize("dtype", ["U8", "BF16", "F32", "I64"])
def test_the_state_digest_is_the_documented_sum(dtype: str) -> None:
    bits = random_bits(np.random.default_rng(1), dtype, 100)
    layout = Layout.of([TensorSpec("a", "U8", (10**6, 10**7)), TensorSpec("b", dtype, (200,))])
    assert state_digest(layout, [Piece("b", 50, bits)]) == reference_digest(10**13 + 50, bits)


def test_moving_or_swapping_values_changes_the_digest() -> None:
    layout = Layout.of([TensorSpec("w", "BF16", (4,))])
    digests = {
        state_digest(layout, [Piece("w", 0, np.array(bits, np.uint16))])
        for bits in ([1, 2, 3, 4], [2, 1, 3, 4], [1, 2, 4, 3], [0, 1, 2, 3], [0, 0, 0, 0], [1, 1, 3, 5])
    }
    assert len(digests) == 6


@pytest.mark.parametrize(
    ("pieces", "why"),
    [
        ([Piece("w", 0, np.zeros(5, np.uint16))], "covers"),
        ([Piece("w", -1, np.zeros(2, np.uint16))], "covers"),
        ([Piece("w", 0, np.zeros(4, np.uint32))], "must be"),
        ([Piece("w", 0, np.zeros(8, np.uint16)[::2])], "must be"),
        ([Piece("w", 0, np.zeros(3, np.uint16)), Piece("w", 2, np.zeros(2, np.uint16))], "overlap"),
    ],
)
def test_pieces_that_do_not_fit_the_layout_are_refused(pieces: list[Piece], why: str) -> None:
    layout = Layout.of([TensorSpec("w", "BF16", (4,))])
    with pytest.raises(UsageError, match=why):
        encode_delta(layout, pieces, pieces)


def test_base_and_new_state_must_be_the_same_pieces() -> None:
    layout = Layout.of([TensorSpec("w", "BF16", (4,))])
    with pytest.raises(UsageError, match="differ"):
        encode_delta(layout, [Piece("w", 0, np.zeros(4, np.uint16))], [Piece("w", 0, np.zeros(3, np.uint16))])
    with pytest.raises(UsageError, match="pieces"):
        encode_delta(layout, [], [Piece("w", 0, np.zeros(3, np.uint16))])


def test_layouts_refuse_what_the_log_cannot_carry() -> None:
    with pytest.raises(UsageError, match="dtype"):
        Layout.of([TensorSpec("w", "C64", (4,))])
    with pytest.raises(UsageError, match="distinct"):
        Layout.of([TensorSpec("w", "BF16", (4,)), TensorSpec("w", "BF16", (4,))])
    with pytest.raises(UsageError, match="negative"):
        Layout.of([TensorSpec("w", "BF16", (-4,))])
