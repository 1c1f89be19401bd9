"""One optimizer step as a deterministic function of (training state, batch): run again, it gives the same bits."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from agents.trainer.batch import Batch, MicroBatch, collate, plan_micro_batches
from agents.trainer.grpo import kl_penalty, policy_loss, token_entropies, token_logprobs
from agents.trainer.optimizer import MasterOptimizer
from agents.trainer.policy import Policy
from whimbrel.spec import RunSpec

_SUMS: tuple[str, ...] = ("loss", "entropy", "kl", "clipped", "staleness", "mismatch", "same_version", "tokens")


def make_deterministic() -> None:
    """Ask torch for reproducible kernels and one thread; call once, before anything is computed."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    # The order of a sum over threads is not fixed, and a second thread on a busy machine costs more than it brings.
    torch.set_num_threads(1)


def step_rng(seed: int, trainer_step: int) -> dict[str, int]:
    """The state of the random generators before a step: a function of the run's seed and the step, so it cannot be lost."""
    return {"seed": seed, "torch": (seed * 1_000_003 + trainer_step) % 2**63}


@dataclass(frozen=True)
class StepOutcome:
    """What a step did; equal on all ranks but for the measured times."""

    applied: bool
    """False: loss or gradient was not finite, and nothing was changed."""
    metrics: dict[str, float]


class Stepper:
    """Runs steps on a training state."""

    def __init__(
        self,
        optimizer: MasterOptimizer,
        spec: RunSpec,
        reference: Policy | None = None,
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        """`tick` is called after each micro-batch."""
        self.optimizer = optimizer
        self.policy = optimizer.policy
        self.spec = spec
        self._tick = tick
        self.reference = reference
        """Version 0, for the KL penalty."""
        if spec.algorithm.kl_coef > 0 and reference is None:
            raise ValueError("a KL penalty needs the reference policy")

    def run(self, batch: Batch, trainer_step: int) -> StepOutcome:
        """Train on a batch: gradients over micro-batches and ranks, clip, AdamW, cast.

        A step whose loss or gradient is not finite leaves masters, moments and parameters as they were.
        """
        started = time.monotonic()
        ranks = self.policy.ranks
        torch.manual_seed(step_rng(self.spec.seed, trainer_step)["torch"])
        self.policy.clear_gradients()
        plan = plan_micro_batches(batch.padded_lengths, self.spec.algorithm.micro_batch_tokens, ranks.world_size)
        local = np.zeros(len(_SUMS), np.float64)
        greatest_staleness = 0
        for indices in plan[ranks.rank]:
            micro = collate(batch, indices, self.policy.device)
            local += self._micro_batch(micro, max(1, batch.trained_tokens))
            self._tick()
            greatest_staleness = max(greatest_staleness, int(micro.staleness.max()) if len(micro.staleness) else 0)
        sums: dict[str, float] = dict(zip(_SUMS, ranks.sum(local.tolist()).tolist(), strict=True))
        norm = self.optimizer.gradient_norm()
        applied = math.isfinite(norm) and math.isfinite(sums["loss"])
        if applied:
            self.optimizer.update(trainer_step, norm)
        self.policy.clear_gradients()
        metrics = _metrics(batch, sums, norm, max(ranks.gather(greatest_staleness)), time.monotonic() - started)
        return StepOutcome(applied, metrics)

    def _micro_batch(self, micro: MicroBatch, trained_tokens: int) -> np.ndarray:
        """Forward and backward of one micro-batch; returns its sums for the metrics."""
        algorithm, temperature = self.spec.algorithm, self.spec.sampling.temperature
        logits = self.policy.forward(micro.inputs, micro.keep)
        chosen = logits[micro.rows, micro.places]
        logp = token_logprobs(chosen, micro.targets, temperature)
        result = policy_loss(logp, micro.sampled, micro.advantages, algorithm)
        loss = (result.loss * micro.weights).sum()
        kl = torch.zeros_like(logp)
        if self.reference is not None:
            with torch.no_grad():
                distant = self.reference.forward(micro.inputs, micro.keep)[micro.rows, micro.places]
                reference = token_logprobs(distant, micro.targets, temperature)
            kl = kl_penalty(logp, reference)
            loss = loss + algorithm.kl_coef * (kl * micro.weights).sum()
        # FSDP averages gradients over the ranks; the loss is a sum over all of them divided by all tokens. An empty
        # micro-batch goes through the backward pass too, because the other ranks wait for it in the layers' collectives.
        (loss / trained_tokens * self.policy.ranks.world_size).backward()
        self.policy.take_gradients()
        with torch.no_grad():
            same = (micro.staleness == 0).to(logp.dtype)
            entropy = token_entropies(chosen, temperature)
            sums = [
                loss, entropy.sum(), kl.sum(), (result.clipped * micro.weights).sum(), micro.staleness.sum(),
                ((logp - micro.sampled).abs() * same).sum(), same.sum(), torch.tensor(len(logp)),
            ]  # fmt: skip
            return np.array([float(each) for each in sums], np.float64)


def _metrics(
    batch: Batch, sums: dict[str, float], norm: float, greatest_staleness: int, seconds: float
) -> dict[str, float]:
    tokens, trained = max(1.0, sums["tokens"]), max(1, batch.trained_tokens)
    rewards = np.array([row.reward for row in batch.rows], np.float64)
    metrics = {
        "reward/mean": float(rewards.mean()),
        "reward/p10": float(np.quantile(rewards, 0.1)),
        "reward/p90": float(np.quantile(rewards, 0.9)),
        "loss": sums["loss"] / trained,
        "optim/grad_norm": norm,
        "entropy/mean": sums["entropy"] / tokens,
        "kl/ref": sums["kl"] / tokens,
        "clip/frac": sums["clipped"] / trained,
        "staleness/mean": sums["staleness"] / tokens,
        "staleness/max": float(greatest_staleness),
        "mismatch": sums["mismatch"] / max(1.0, sums["same_version"]),
        "groups/zero_advantage": float(batch.zero_advantage_groups),
        "groups/total": float(batch.groups),
        "tokens/trained": float(batch.trained_tokens),
        "tokens/too_stale": float(batch.stale_tokens),
        "completion/length": sums["tokens"] / max(1, len(batch.rows)),
        "time/step": seconds,
        "perf/tokens_per_s": sums["tokens"] / max(seconds, 1e-9),
    }
    # A record holds numbers that every reader can parse: what is not finite is said by its own incident.
    return {key: value for key, value in metrics.items() if math.isfinite(value)}
