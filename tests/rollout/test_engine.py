"""The engine says exactly what the policy would: log-probs, weights, spans, whatever else is in the batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agents.rollout.engines.base import Row
from agents.rollout.engines.local import TransformersEngine
from agents.rollout.engines.sampling import BrokenPolicy, draw, uniforms
from tests.rollout.world import bits_of, layout_of, loaded_engine, stepped, write_model_files
from whimbrel.delta import Change
from whimbrel.errors import UsageError

PROMPTS = [[7, 12, 3], [14, 15, 5, 12, 9, 14, 16, 17, 2], [4]]


def rows_of(prompts: list[list[int]], samples: int = 2, max_tokens: int = 9) -> list[Row]:
    return [
        Row(f"grp_{number}", sample, prompt, seed=100 * number + sample, max_tokens=max_tokens)
        for number, prompt in enumerate(prompts)
        for sample in range(samples)
    ]


def finish(engine: TransformersEngine, rows: list[Row]) -> list[Row]:
    engine.add([row for row in rows if not row.finish_reason])
    while not all(row.finish_reason for row in rows):
        engine.step()
    return rows


def full_logprobs(model: torch.nn.Module, row: Row) -> list[float]:
    with torch.no_grad():
        logits = model(torch.tensor([row.prompt + row.tokens])).logits[0]
    table = torch.log_softmax(logits.float(), -1)
    return [float(table[len(row.prompt) - 1 + place, token]) for place, token in enumerate(row.tokens)]


def changes_between(old: dict[str, np.ndarray], new: dict[str, np.ndarray]) -> list[Change]:
    return [Change(name, np.flatnonzero(old[name] != new[name]), new[name][old[name] != new[name]]) for name in old]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def model(folder: Path) -> torch.nn.Module:
    return write_model_files(folder)


def test_logprobs_are_those_of_a_plain_forward_pass(folder: Path, model: torch.nn.Module) -> None:
    for row in finish(loaded_engine(folder, model), rows_of(PROMPTS)):
        np.testing.assert_allclose(row.logprobs, full_logprobs(model, row), atol=2e-5)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(order=st.permutations(range(6)), late=st.integers(0, 5))
def test_a_sample_does_not_depend_on_the_rest_of_the_batch(
    folder: Path, model: torch.nn.Module, order: list[int], late: int
) -> None:
    alone = {(r.group_id, r.sample): finish(loaded_engine(folder, model), [r])[0] for r in rows_of(PROMPTS)}
    engine = loaded_engine(folder, model)
    rows = [rows_of(PROMPTS)[place] for place in order]
    engine.add(rows[late:])
    engine.step()  # the others join a batch that is under way
    engine.add(rows[:late])
    while not all(row.finish_reason for row in rows):
        engine.step()
    for row in rows:
        expected = alone[(row.group_id, row.sample)]
        assert row.tokens == expected.tokens
        np.testing.assert_allclose(row.logprobs, expected.logprobs, atol=2e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_a_patched_model_is_a_loaded_one_bit_for_bit(tmp_path: Path, tied: bool) -> None:
    model = write_model_files(tmp_path, tied=tied)
    old = bits_of(model)
    new = stepped(stepped(old, 1), 2)
    new["model.norm.weight"][:3] = [0x8000, 0x7FC1, 0x0001]  # -0.0, a NaN with payload, a denormal
    patched, loaded = loaded_engine(tmp_path, model), TransformersEngine(1.0, "recompute", "cpu")
    patched.apply(1, changes_between(old, new))
    loaded.load(1, tmp_path, layout_of(model), new)
    assert patched.version == loaded.version == 1
    for name in new:
        assert np.array_equal(patched.weights.bits(name), new[name])
        assert np.array_equal(loaded.weights.bits(name), new[name])


@pytest.mark.parametrize("steps_before", [1, 3])
def test_after_an_apply_logprobs_are_those_of_the_new_policy(
    folder: Path, model: torch.nn.Module, tmp_path: Path, steps_before: int
) -> None:
    engine = loaded_engine(folder, model)
    rows = rows_of(PROMPTS, max_tokens=8)
    engine.add(rows)
    for _ in range(steps_before):
        engine.step()
    old, new = bits_of(model), stepped(bits_of(model), 5)
    engine.apply(1, changes_between(old, new))
    while not all(row.finish_reason for row in rows):
        engine.step()
    other = write_model_files(tmp_path)
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            parameter.copy_(torch.from_numpy(new[name].view(np.int16)).view(torch.bfloat16).view(parameter.shape))
    for row in rows:
        before, after = full_logprobs(model, row), full_logprobs(other, row)
        for span in row.spans:
            policy = before if span.version == 0 else after
            place = slice(span.start, span.start + span.length)
            np.testing.assert_allclose(row.logprobs[place], policy[place], atol=2e-5)
    assert any(len(row.spans) == 2 for row in rows)


def test_keep_goes_on_with_the_old_cache(folder: Path, model: torch.nn.Module) -> None:
    engine = loaded_engine(folder, model, "keep")
    rows = rows_of(PROMPTS)
    engine.add(rows)
    engine.step()
    engine.apply(1, changes_between(bits_of(model), stepped(bits_of(model), 5)))
    engine.step()
    assert any([span.version for span in row.spans] == [0, 1] for row in rows)


def test_spans_cover_all_tokens_in_order_without_gap(folder: Path, model: torch.nn.Module) -> None:
    engine = loaded_engine(folder, model)
    rows = rows_of(PROMPTS, max_tokens=10)
    engine.add(rows)
    bits = bits_of(model)
    for version in range(1, 12):
        engine.step()
        if version % 2:
            new = stepped(bits, version, share=0.01)
            engine.apply(version, changes_between(bits, new))
            bits = new
    for row in rows:
        assert row.finish_reason in ("stop", "length")
        place = 0
        for span, later in zip(row.spans, [*row.spans[1:], None], strict=True):
            assert span.start == place
            assert later is None or later.version > span.version
            place += span.length
        assert place == len(row.tokens) == len(row.logprobs)


def test_a_continued_sample_keeps_its_prefix_and_ends_like_the_whole(folder: Path, model: torch.nn.Module) -> None:
    whole = finish(loaded_engine(folder, model), rows_of(PROMPTS))
    for number, row in enumerate(rows_of(PROMPTS)):
        if len(whole[number].tokens) < 3:
            continue
        row.tokens, row.logprobs = whole[number].tokens[:2], whole[number].logprobs[:2]
        row.spans = [whole[number].spans[0].__class__(0, 0, 2)]
        engine = loaded_engine(folder, model, version=4)
        finish(engine, [row])
        assert row.tokens == whole[number].tokens
        assert [span.version for span in row.spans] == [0, 4]


def test_dropped_groups_leave_the_others_as_they_are(folder: Path, model: torch.nn.Module) -> None:
    whole = finish(loaded_engine(folder, model), rows_of(PROMPTS))
    engine = loaded_engine(folder, model)
    rows = rows_of(PROMPTS)
    engine.add(rows)
    engine.step()
    engine.step()
    assert engine.drop("grp_1") == sum(len(row.tokens) for row in rows if row.group_id == "grp_1")
    while any(not row.finish_reason for row in rows if row.group_id != "grp_1"):
        engine.step()
    for row, expected in zip(rows, whole, strict=True):
        assert row.group_id == "grp_1" or row.tokens == expected.tokens


def test_a_log_of_another_model_is_refused(folder: Path, model: torch.nn.Module, tmp_path: Path) -> None:
    other = write_model_files(tmp_path, tied=False)
    engine = TransformersEngine(1.0, "recompute", "cpu")
    with pytest.raises(UsageError, match="other tensors"):
        engine.load(
            0,
            folder,
            layout_of(other).of([*layout_of(other).tensors, type(layout_of(other).tensors[0])("x", "BF16", (1,))]),
            bits_of(other),
        )
    assert engine.version == -1


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31 - 1), rows=st.integers(1, 6), temperature=st.floats(0.2, 3))
def test_draws_follow_the_distribution_and_never_take_what_cannot_be(seed: int, rows: int, temperature: float) -> None:
    logits = torch.randn(rows, 11, generator=torch.Generator().manual_seed(seed)) * 4
    logits[:, 4] = -torch.inf
    chances = uniforms(np.arange(rows, dtype=np.uint64) + np.uint64(seed), np.zeros(rows, np.uint64))
    tokens, logprobs = draw(logits, temperature, chances)
    assert 4 not in tokens
    expected = torch.log_softmax(logits / temperature, -1)[torch.arange(rows), torch.tensor(tokens)]
    np.testing.assert_allclose(logprobs, expected, atol=1e-6)


def test_uniforms_are_even() -> None:
    seeds, places = np.meshgrid(np.arange(200, dtype=np.uint64), np.arange(50, dtype=np.uint64))
    values = uniforms(seeds.ravel(), places.ravel())
    counts, _ = np.histogram(values, bins=20, range=(0, 1))
    assert len(set(values.tolist())) == values.size
    assert np.all(np.abs(counts - 500) < 120)


def test_broken_logits_are_an_error_and_no_token() -> None:
    with pytest.raises(BrokenPolicy):
        draw(torch.full((1, 5), torch.nan), 1.0, np.array([0.5]))
