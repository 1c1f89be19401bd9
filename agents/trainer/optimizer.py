"""AdamW on the masters: exact, deterministic, with a global clip of the gradient; its state as named arrays.

The learning rate depends on the trainer's step alone, so that it needs no state of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from agents.trainer.policy import Policy, Shard, rows_of
from whimbrel.checkpoint import ArrayShard, combine_digests, training_digest
from whimbrel.errors import Corrupt
from whimbrel.spec import OptimizerSpec

UPDATES = "optimizer/updates"
"""Key of the number of updates that were applied."""


def learning_rate(spec: OptimizerSpec, trainer_step: int) -> float:
    """Linear warm-up over `warmup_steps`, then constant."""
    if trainer_step < spec.warmup_steps:
        return spec.lr * (trainer_step + 1) / spec.warmup_steps
    return spec.lr


class MasterOptimizer:
    """The training state of this rank: the policy's masters and their moments."""

    def __init__(self, policy: Policy, spec: OptimizerSpec) -> None:
        self.policy = policy
        self.spec = spec
        self.updates = 0
        # Not foreach or fused: one plain loop gives the same bits whatever else is in memory.
        self._adam = torch.optim.AdamW(
            [shard.master for shard in policy.shards],
            lr=spec.lr,
            betas=spec.betas,
            eps=spec.eps,
            weight_decay=spec.weight_decay,
            foreach=False,
            fused=False,
        )
        self._load_moments({})

    def gradient_norm(self) -> float:
        """Euclidean norm of the whole gradient, over all ranks; NaN or infinite when any element is."""
        squares = [float(shard.gradient.double().square().sum()) for shard in self.policy.shards]
        return float(np.sqrt(self.policy.ranks.sum(squares).sum()))

    @torch.no_grad()
    def update(self, trainer_step: int, gradient_norm: float) -> None:
        """One AdamW step from the shards' gradients, scaled down to `max_grad_norm`, then the cast to bf16."""
        scale = min(1.0, self.spec.max_grad_norm / (gradient_norm + 1e-6))
        for shard in self.policy.shards:
            shard.master.grad = shard.gradient.mul_(scale) if scale < 1.0 else shard.gradient
        for group in self._adam.param_groups:
            group["lr"] = learning_rate(self.spec, trainer_step)
        self._adam.step()
        for shard in self.policy.shards:
            shard.master.grad = None
        self.updates += 1
        self.policy.cast()

    def arrays(self) -> list[ArrayShard]:
        """The full training state of this rank, sharing memory where it lies on the CPU."""
        shards: list[ArrayShard] = []
        for shard in self.policy.shards:
            if shard.master.numel():
                state = self._adam.state[shard.master]
                shards.append(_array(shard, "master", shard.master))
                shards.append(_array(shard, "exp_avg", state["exp_avg"]))
                shards.append(_array(shard, "exp_avg_sq", state["exp_avg_sq"]))
        if self.policy.ranks.first:
            shards.append(ArrayShard(UPDATES, (1,), 0, np.array([self.updates], np.int64)))
        return shards

    def training_digest(self) -> str:
        """Digest of the training state over all ranks, the same for every world size."""
        return combine_digests(self.policy.ranks.gather(training_digest(self.arrays())))

    def load(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Set masters and moments from whole arrays.

        Raises:
            Corrupt: one is missing or of another shape.
        """
        if UPDATES not in arrays:
            raise Corrupt("The training state does not say how many updates it has had.")
        self.policy.load({key.removeprefix("master/"): array for key, array in arrays.items() if "master/" in key[:7]})
        self.updates = int(arrays[UPDATES][0])
        self._load_moments(arrays)

    def reset_moments(self) -> None:
        """Forget the moments: the next step is the first."""
        self.updates = 0
        self._load_moments({})

    def _load_moments(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        for shard in self.policy.shards:
            moments = {
                kind: rows_of(arrays, f"{kind}/{shard.name}", shard).to(shard.master.device)
                if arrays
                else torch.zeros_like(shard.master)
                for kind in ("exp_avg", "exp_avg_sq")
            }
            self._adam.state[shard.master] = {"step": torch.tensor(float(self.updates)), **moments}


def _array(shard: Shard, kind: str, values: torch.Tensor) -> ArrayShard:
    return ArrayShard(f"{kind}/{shard.name}", shard.shape, shard.start, values.detach().cpu().numpy())
