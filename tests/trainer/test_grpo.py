from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.trainer.batch import collate, make_batch, plan_micro_batches
from agents.trainer.grpo import group_advantages, kl_penalty, policy_loss, token_entropies, token_logprobs
from agents.trainer.optimizer import learning_rate
from agents.trainer.snapshots import SnapshotSchedule
from tests.trainer.support import VOCABULARY, make_group
from whimbrel.errors import Corrupt
from whimbrel.limits import EXPECTED_FAILURE_EVERY_S, SNAPSHOT_VERSIONS_MAX
from whimbrel.spec import AlgorithmSpec, OptimizerSpec
from whimbrel.wire.payload import Sample, VersionSpan

quick = settings(max_examples=40, deadline=None)
rewards = st.lists(st.floats(-100, 100, allow_nan=False, width=32), min_size=2, max_size=16)


@quick
@given(rewards, st.booleans())
def test_advantages_are_centred_and_keep_the_order(values: list[float], normalize: bool) -> None:
    advantages = group_advantages(torch.tensor(values), normalize=normalize)
    assert abs(float(advantages.double().sum())) <= 1e-4 * max(1.0, float(advantages.abs().max()))
    order = sorted(range(len(values)), key=lambda index: values[index])
    assert all(advantages[low] <= advantages[high] for low, high in itertools.pairwise(order))
    if normalize and max(values) - min(values) > 1e-2:
        assert float(advantages.square().mean()) == pytest.approx(1.0, rel=1e-3)


@given(st.floats(-1e6, 1e6, allow_nan=False), st.integers(2, 9), st.booleans())
@quick
def test_a_group_of_equal_rewards_teaches_nothing(reward: float, count: int, normalize: bool) -> None:
    assert not group_advantages(torch.full((count,), reward, dtype=torch.float64), normalize=normalize).any()


def test_on_policy_the_gradient_is_the_policy_gradient() -> None:
    logp = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    advantage = torch.tensor([1.0, -2.0, 0.0])
    result = policy_loss(logp, logp.detach(), advantage, AlgorithmSpec())
    result.loss.sum().backward()
    assert logp.grad is not None
    assert torch.allclose(logp.grad, -advantage)
    assert not result.clipped.any()


@quick
@given(st.floats(-300, 300), st.floats(-300, 300), st.floats(-5, 5))
def test_loss_and_gradient_are_bounded_whatever_the_ratio(logp: float, sampled: float, advantage: float) -> None:
    algorithm = AlgorithmSpec(ratio_max=2.0)
    current = torch.tensor([logp], dtype=torch.float32, requires_grad=True)
    result = policy_loss(current, torch.tensor([sampled]), torch.tensor([advantage]), algorithm)
    result.loss.sum().backward()
    assert current.grad is not None
    bound = algorithm.ratio_max * abs(advantage) * 1.0001 + 1e-6
    assert torch.isfinite(current.grad).all()
    assert float(current.grad.abs()) <= bound
    assert float(result.loss.detach().abs()) <= bound


@pytest.mark.parametrize(("ratio", "advantage", "clipped"), [
    (1.27, 1.0, False), (1.29, 1.0, True), (0.5, 1.0, False),
    (0.81, -1.0, False), (0.79, -1.0, True), (1.9, -1.0, False), (2.1, -1.0, True),
])  # fmt: skip
def test_clip_takes_the_gradient_only_where_it_would_go_too_far(ratio: float, advantage: float, clipped: bool) -> None:
    logp = torch.tensor([math.log(ratio)], requires_grad=True)
    result = policy_loss(logp, torch.zeros(1), torch.tensor([advantage]), AlgorithmSpec())
    result.loss.sum().backward()
    assert logp.grad is not None
    assert bool(result.clipped) == clipped
    assert bool(logp.grad == 0) == clipped


def test_logprobs_are_those_of_the_tempered_softmax() -> None:
    logits, targets = torch.randn(5, 7), torch.tensor([0, 3, 6, 2, 2])
    expected = torch.log_softmax(logits / 0.7, -1).gather(1, targets[:, None])[:, 0]
    assert torch.allclose(token_logprobs(logits, targets, 0.7), expected, atol=1e-6)
    assert torch.allclose(token_entropies(torch.zeros(2, 8), 0.7), torch.full((2,), math.log(8)))


@quick
@given(st.floats(-20, 0), st.floats(-20, 0))
def test_kl_estimate_is_never_negative(logp: float, reference: float) -> None:
    assert float(kl_penalty(torch.tensor(logp), torch.tensor(reference))) >= -1e-6
    assert float(kl_penalty(torch.tensor(logp), torch.tensor(logp))) == 0


@quick
@given(st.lists(st.integers(2, 60), min_size=1, max_size=40), st.integers(64, 256), st.integers(1, 5))
def test_every_row_is_computed_once_within_the_budget(lengths: list[int], budget: int, world_size: int) -> None:
    plans = plan_micro_batches(lengths, budget, world_size)
    assert sorted(index for plan in plans for rows in plan for index in rows) == list(range(len(lengths)))
    assert len({len(plan) for plan in plans}) == 1
    assert all(len(rows) * max(lengths[index] for index in rows) <= budget for plan in plans for rows in plan if rows)
    assert plan_micro_batches(lengths, budget, world_size) == plans


def test_collate_points_at_the_logits_that_predict_each_token() -> None:
    batch = make_batch([make_group(3, 0)], 3, max_staleness=4, normalize=True, vocabulary=VOCABULARY)
    micro = collate(batch, [2, 0], torch.device("cpu"))
    width = micro.inputs.shape[1]
    successors = torch.roll(micro.inputs, -1, dims=1)[:, width - micro.keep :]
    assert torch.equal(successors[micro.rows, micro.places], micro.targets)
    assert len(micro.targets) == batch.rows[2].completion_length + batch.rows[0].completion_length
    empty = collate(batch, [], torch.device("cpu"))
    assert empty.inputs.shape == (1, 2)
    assert len(empty.targets) == 0


def test_tokens_beyond_the_staleness_bound_are_left_out_and_counted() -> None:
    group = make_group(9, 0, lag=3)
    whole = make_batch([group], 9, max_staleness=3, normalize=True, vocabulary=VOCABULARY)
    tight = make_batch([group], 9, max_staleness=0, normalize=True, vocabulary=VOCABULARY)
    assert whole.stale_tokens == 0 < tight.stale_tokens
    assert whole.trained_tokens == tight.trained_tokens + tight.stale_tokens


@pytest.mark.parametrize("fault", [
    {"reward": None}, {"reward": float("nan")}, {"logprobs": [0.0]}, {"tokens": [1, 2, 9_999]},
    {"spans": [VersionSpan(4, 0, 3)]}, {"spans": [VersionSpan(1, 0, 2)]}, {"spans": [VersionSpan(1, 1, 2)]},
    {"logprobs": [0.0, float("inf"), 0.0]},
])  # fmt: skip
def test_a_payload_that_contradicts_itself_is_refused(fault: dict[str, object]) -> None:
    """Tokens of a version that does not exist yet are an error too, never a negative staleness."""
    fields = {
        "sample": 0,
        "tokens": [1, 2, 3],
        "logprobs": [-1.0, -1.0, -1.0],
        "spans": [VersionSpan(3, 0, 3)],
        "reward": 1.0,
    }
    group = make_group(3, 0)
    group.samples[0] = Sample(**{**fields, **fault})  # type: ignore[arg-type]
    with pytest.raises(Corrupt):
        make_batch([group], 3, max_staleness=4, normalize=True, vocabulary=VOCABULARY)


def test_learning_rate_warms_up() -> None:
    spec = OptimizerSpec(lr=1.0, warmup_steps=4)
    assert [learning_rate(spec, step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_automatic_snapshots_follow_what_they_cost() -> None:
    counts = []
    for cost_s in (0.01, 1.0):
        schedule = SnapshotSchedule("auto")
        schedule.written(cost_s)
        while not schedule.due:
            schedule.stepped(2.0)
        counts.append(schedule.versions)
    assert counts == [math.ceil(math.sqrt(2 * cost_s * EXPECTED_FAILURE_EVERY_S) / 2.0) for cost_s in (0.01, 1.0)]
    schedule.written(1e9)
    for _ in range(SNAPSHOT_VERSIONS_MAX):
        assert not schedule.due
        schedule.stepped(0.001)
    assert schedule.due
