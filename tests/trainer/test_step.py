from __future__ import annotations

import numpy as np
import pytest
import torch

from agents.trainer.batch import Batch, make_batch
from agents.trainer.optimizer import MasterOptimizer
from agents.trainer.policy import Policy
from agents.trainer.ranks import Ranks
from agents.trainer.step import Stepper
from tests.trainer.support import make_group, make_spec, tiny_model
from whimbrel.spec import RunSpec


def _stepper(spec: RunSpec, seed: int = 0, **model: object) -> Stepper:
    policy = Policy(tiny_model(seed, **model), Ranks())
    reference = Policy(tiny_model(seed, **model), Ranks()) if spec.algorithm.kl_coef else None
    return Stepper(MasterOptimizer(policy, spec.optimizer), spec, reference)


def _batch(step: int, groups: int = 2) -> Batch:
    made = [make_group(step, place) for place in range(groups)]
    return make_batch(made, step, max_staleness=4, normalize=True, vocabulary=65)


def test_step_is_bit_deterministic() -> None:
    digests = []
    for _ in range(2):
        stepper = _stepper(make_spec())
        for step in range(3):
            assert stepper.run(_batch(step), step).applied
        digests.append((stepper.optimizer.training_digest(), stepper.policy.state_digest()))
    assert digests[0] == digests[1]


def test_step_depends_on_the_batch() -> None:
    ends = set()
    for batch in (_batch(0), _batch(0, 3)):
        stepper = _stepper(make_spec())
        stepper.run(batch, 0)
        ends.add(stepper.optimizer.training_digest())
    assert len(ends) == 2


@pytest.mark.parametrize("tied", [True, False])
def test_model_computes_with_the_published_bits(tied: bool) -> None:
    stepper = _stepper(make_spec(), tied=tied, kind="qwen3")
    stepper.run(_batch(0), 0)
    model = tiny_model(5, tied=tied, kind="qwen3")
    values = {
        piece.name: torch.from_numpy(piece.bits.view(np.int16)).view(torch.bfloat16).float()
        for piece in stepper.policy.pieces()
    }
    names = set(dict(model.named_parameters()))
    assert set(values) == names
    assert ("lm_head.weight" in names) is not tied
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values[name].view(parameter.shape))
    inputs = torch.arange(20).view(2, 10)
    with torch.no_grad():
        assert torch.equal(model(input_ids=inputs).logits[:, -3:], stepper.policy.forward(inputs, 3))


def test_micro_batches_do_not_change_what_is_learnt() -> None:
    ends = []
    for tokens in (64, 16_384):
        spec = make_spec(algorithm={"group_size": 4, "micro_batch_tokens": tokens})
        stepper = _stepper(spec)
        metrics = stepper.run(_batch(0), 0).metrics
        ends.append((metrics, stepper.policy.shards[0].master.clone()))
    assert ends[0][0]["loss"] == pytest.approx(ends[1][0]["loss"], abs=1e-6)
    assert ends[0][0]["optim/grad_norm"] == pytest.approx(ends[1][0]["optim/grad_norm"], rel=1e-4)
    assert torch.allclose(ends[0][1], ends[1][1], atol=1e-4)


def test_numbers_that_are_not_finite_change_nothing() -> None:
    stepper = _stepper(make_spec())
    before = stepper.optimizer.training_digest()
    with torch.no_grad():
        stepper.policy.shards[-1].local()[0] = float("nan")
    outcome = stepper.run(_batch(0), 0)
    assert not outcome.applied
    stepper.policy.cast()
    assert stepper.optimizer.training_digest() == before
    assert stepper.run(_batch(0), 0).applied


def test_kl_to_version_zero_is_zero_at_version_zero_and_grows() -> None:
    spec = make_spec(algorithm={"group_size": 4, "kl_coef": 0.1})
    stepper = _stepper(spec)
    values = [stepper.run(_batch(step), step).metrics["kl/ref"] for step in range(3)]
    assert abs(values[0]) < 1e-7
    assert values[2] > values[1] > 0


def test_metrics_say_what_happened() -> None:
    metrics = _stepper(make_spec()).run(_batch(3), 3).metrics
    assert metrics["staleness/max"] == 1
    assert 0 < metrics["staleness/mean"] < 1
    assert metrics["reward/p10"] <= metrics["reward/mean"] <= metrics["reward/p90"]
    assert 0 <= metrics["clip/frac"] <= 1
    assert metrics["entropy/mean"] == pytest.approx(np.log(65), rel=0.05)


def test_policy_gradient_raises_the_probability_of_what_was_rewarded() -> None:
    stepper = _stepper(make_spec(optimizer={"lr": 3e-3}))
    group = make_group(0, 0)
    best = max(range(4), key=lambda index: group.samples[index].reward or 0)
    ids = torch.tensor([[*group.prompt_tokens, *group.samples[best].tokens]])

    def logp() -> float:
        count = len(group.samples[best].tokens)
        with torch.no_grad():
            logits = stepper.policy.forward(ids, count + 1)[0, :-1]
        return float(torch.log_softmax(logits, -1).gather(1, ids[0, -count:, None]).sum())

    before = logp()
    for step in range(4):
        stepper.run(make_batch([group], 0, max_staleness=4, normalize=True, vocabulary=65), step)
    assert logp() > before
