"""GRPO as pure functions of tensors: advantages, importance ratio, loss, KL penalty.

Sources: group-relative advantages and the clipped surrogate from DeepSeekMath (arXiv 2402.03300, section 4.1); a higher
upper clip and the mean over all tokens of the batch from DAPO (arXiv 2503.14476, sections 3.1 and 3.3); the importance
ratio truncated from above for stale data from AIPO in LlamaRL (arXiv 2505.24034).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from whimbrel.spec import AlgorithmSpec

ADVANTAGE_EPS: Final = 1e-6
"""Added to a group's standard deviation before dividing by it."""


def group_advantages(rewards: Tensor, *, normalize: bool) -> Tensor:
    """How much better than its group each sample is.

    Args:
        rewards: [samples], any float dtype, of one prompt group.
        normalize: divide by the group's (population) standard deviation.

    Returns:
        [samples] float32; all zero when the rewards are equal.
    """
    values = rewards.to(torch.float64)
    if bool((values == values[0]).all()):
        return torch.zeros_like(values, dtype=torch.float32)
    centred = values - values.mean()
    if normalize:
        centred = centred / (centred.square().mean().sqrt() + ADVANTAGE_EPS)
    return centred.to(torch.float32)


def token_logprobs(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """Log-probability of each target under softmax(logits / temperature).

    Args:
        logits: [tokens, vocabulary], any float dtype; computed in float32.
        targets: [tokens] int64.

    Returns:
        [tokens] float32, differentiable.
    """
    return -F.cross_entropy(logits.float() / temperature, targets, reduction="none")


@torch.no_grad()
def token_entropies(logits: Tensor, temperature: float) -> Tensor:
    """Entropy in nats of softmax(logits / temperature), [tokens] float32; for metrics."""
    logp = torch.log_softmax(logits.detach().float() / temperature, dim=-1)
    return -(logp.exp() * logp).sum(-1)


@dataclass(frozen=True)
class TokenLoss:
    """Per token: the loss, and whether clipping or truncation took its gradient."""

    loss: Tensor
    clipped: Tensor


def policy_loss(logp: Tensor, sampled: Tensor, advantage: Tensor, algorithm: AlgorithmSpec) -> TokenLoss:
    """-min(r A, clip(r, 1 - low, 1 + high) A) with r = min(exp(logp - sampled), ratio_max), per token.

    Args:
        logp: [tokens] under the policy in training, differentiable.
        sampled: [tokens] under the policy that sampled them.
        advantage: [tokens].
    """
    bound = math.log(algorithm.ratio_max)
    difference = logp - sampled
    # Bounded before exp: an infinite exp would make the gradient NaN where the bound makes it 0.
    ratio = torch.exp(difference.clamp(max=bound))
    low, high = 1.0 - algorithm.clip_low, 1.0 + algorithm.clip_high
    loss = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    with torch.no_grad():
        outside = ((ratio > high) & (advantage > 0)) | ((ratio < low) & (advantage < 0))
        clipped = (outside | (difference > bound)) & (advantage != 0)
    return TokenLoss(loss, clipped)


def kl_penalty(logp: Tensor, reference: Tensor) -> Tensor:
    """The always positive, unbiased estimate exp(d) - d - 1 of KL(policy || reference), d = reference - logp, per token."""
    difference = reference - logp
    return torch.exp(difference) - difference - 1.0
