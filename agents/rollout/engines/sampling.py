"""Drawing tokens: reproducible per sample, whatever else is in the batch."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whimbrel.errors import WhimbrelError

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class BrokenPolicy(WhimbrelError):
    """The policy's logits are not finite."""

    code = "broken_policy"


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.float64]:
    """A number in [0, 1) for each (seed, position): SplitMix64 (Steele, Lea, Flood 2014), counter-based, 53 bits."""
    with np.errstate(over="ignore"):
        z = _scramble(seeds * _GOLDEN + np.uint64(1)) + (positions + np.uint64(1)) * _GOLDEN
        return (_scramble(z) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _scramble(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def draw(logits: Tensor, temperature: float, chances: NDArray[np.float64]) -> tuple[list[int], list[float]]:
    """Sample one token per row by inverting the cumulative distribution.

    Args:
        logits: [rows, vocabulary], any float dtype.
        temperature: > 0.
        chances: [rows], each in [0, 1).

    Returns:
        Tokens, and their log-probabilities at that temperature (float32 log-softmax).

    Raises:
        BrokenPolicy: a row's logits are NaN or infinite, so there is nothing to draw from.
    """
    logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
    cumulative = logprobs.exp().double().cumsum(dim=-1)
    total = cumulative[:, -1:]
    if not bool(torch.isfinite(total).all()):
        raise BrokenPolicy(
            "The policy's logits are not finite, so no token can be drawn.",
            hint="The learning rate may be too high; fork the run from an earlier version.",
        )
    targets = torch.from_numpy(chances).to(logits.device).unsqueeze(1) * total
    # `right`: the first column whose sum exceeds the target, which therefore has a probability above 0.
    tokens = torch.searchsorted(cumulative, targets, right=True).clamp_(max=logits.shape[-1] - 1)
    return tokens.squeeze(1).tolist(), logprobs.gather(1, tokens).squeeze(1).tolist()
