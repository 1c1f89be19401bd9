"""From the payloads of a batch to rows and micro-batches. Pure and deterministic: the same batch gives the same plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from agents.trainer.grpo import group_advantages
from whimbrel.errors import Corrupt
from whimbrel.wire.payload import GroupPayload, Sample


@dataclass(frozen=True)
class Row:
    """One trajectory as the trainer needs it. Arrays are [completion tokens]."""

    tokens: NDArray[np.int64]
    """[prompt + completion]."""
    prompt_length: int
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int64]
    weights: NDArray[np.float32]
    """1 where the token is trained on, 0 where it is older than the staleness bound."""
    advantage: float
    reward: float

    @property
    def completion_length(self) -> int:
        """Tokens that were sampled."""
        return len(self.logprobs)


@dataclass(frozen=True)
class Batch:
    """All rows of a step, the same on every rank."""

    policy_version: int
    rows: tuple[Row, ...]
    groups: int
    zero_advantage_groups: int
    trained_tokens: int
    """Tokens with weight 1: the loss is their mean."""
    stale_tokens: int
    """Tokens left out because they are older than the bound."""

    @property
    def padded_lengths(self) -> list[int]:
        return [len(row.tokens) for row in self.rows]


def make_batch(
    groups: Sequence[GroupPayload], policy_version: int, *, max_staleness: int, normalize: bool, vocabulary: int
) -> Batch:
    """Rows of all samples in the order of groups and samples.

    Raises:
        Corrupt: a payload that contradicts itself, or the policy: lengths, spans, token ids, missing rewards, tokens of a
            version that does not exist yet.
    """
    rows: list[Row] = []
    zero = 0
    for group in groups:
        for sample in group.samples:
            check_sample(group, sample, policy_version, vocabulary)
        if not group.samples:
            raise Corrupt(f"Prompt group {group.group_id} has no samples.")
        rewards = torch.tensor([float(sample.reward or 0.0) for sample in group.samples], dtype=torch.float64)
        advantages = group_advantages(rewards, normalize=normalize).tolist()
        zero += not any(advantages)
        rows += [
            _row(group, sample, advantage, policy_version - max_staleness)
            for sample, advantage in zip(group.samples, advantages, strict=True)
        ]
    trained = int(sum(float(row.weights.sum()) for row in rows))
    total = sum(row.completion_length for row in rows)
    return Batch(policy_version, tuple(rows), len(groups), zero, trained, total - trained)


def check_sample(group: GroupPayload, sample: Sample, policy_version: int, vocabulary: int) -> None:
    """Raises Corrupt unless the sample can be trained on at this version."""
    where = f"sample {sample.sample} of prompt group {group.group_id}"
    count = len(sample.tokens)
    if sample.reward is None or not np.isfinite(sample.reward):
        raise Corrupt(f"The reward of {where} is {sample.reward}.")
    if len(sample.logprobs) != count or not np.isfinite(sample.logprobs).all():
        raise Corrupt(f"The log-probs of {where} do not fit its {count} tokens.")
    if not group.prompt_tokens or not all(0 <= token < vocabulary for token in [*group.prompt_tokens, *sample.tokens]):
        raise Corrupt(f"Not all tokens of {where} are in the vocabulary of {vocabulary}.")
    at = 0
    for span in sample.spans:
        if span.start != at or span.length < 0 or not 0 <= span.version <= policy_version:
            raise Corrupt(f"The version spans of {where} are not in order, or are ahead of version {policy_version}.")
        at += span.length
    if at != count:
        raise Corrupt(f"The version spans of {where} cover {at} of its {count} tokens.")


def _row(group: GroupPayload, sample: Sample, advantage: float, oldest: int) -> Row:
    versions = np.concatenate(
        [np.zeros(0, np.int64), *(np.full(span.length, span.version, np.int64) for span in sample.spans)]
    )
    return Row(
        tokens=np.array([*group.prompt_tokens, *sample.tokens], np.int64),
        prompt_length=len(group.prompt_tokens),
        logprobs=np.array(sample.logprobs, np.float32),
        versions=versions,
        weights=(versions >= oldest).astype(np.float32),
        advantage=advantage,
        reward=float(sample.reward or 0.0),
    )


def plan_micro_batches(lengths: Sequence[int], token_budget: int, world_size: int) -> list[list[list[int]]]:
    """Which rows each rank computes together: result[rank] is a list of micro-batches of row indices.

    Rows are dealt to the ranks by falling length, to and fro, then packed so that rows × longest row stays within
    `token_budget` (a single longer row goes alone). Every rank gets the same number of micro-batches, empty ones where it has
    fewer rows: sharded layers meet in a collective for each.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    dealt: list[list[int]] = [[] for _ in range(world_size)]
    for place, index in enumerate(order):
        turn, seat = divmod(place, world_size)
        dealt[seat if turn % 2 == 0 else world_size - 1 - seat].append(index)
    plans = [_pack(rows, lengths, token_budget) for rows in dealt]
    count = max(len(plan) for plan in plans)
    return [plan + [[] for _ in range(count - len(plan))] for plan in plans]


def _pack(rows: Sequence[int], lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    packed: list[list[int]] = []
    for index in rows:  # by falling length: the first row of a micro-batch is its longest
        if packed and (len(packed[-1]) + 1) * lengths[packed[-1][0]] <= token_budget:
            packed[-1].append(index)
        else:
            packed.append([index])
    return packed


@dataclass(frozen=True)
class MicroBatch:
    """Tensors of one forward pass. `keep` last positions of the logits cover all completion tokens."""

    inputs: torch.Tensor
    """[rows, longest] int64, right-padded with 0. Causal attention never looks at what is to the right."""
    keep: int
    rows: torch.Tensor
    """[tokens] row of each completion token."""
    places: torch.Tensor
    """[tokens] position among the kept logits that predicts the token."""
    targets: torch.Tensor
    sampled: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor
    staleness: torch.Tensor


def collate(batch: Batch, indices: Sequence[int], device: torch.device) -> MicroBatch:
    """Pad rows to one rectangle; an empty micro-batch is one row of two tokens without a completion."""
    rows = [batch.rows[index] for index in indices]
    longest = max([len(row.tokens) for row in rows], default=2)
    inputs = np.zeros((max(1, len(rows)), longest), np.int64)
    first = min([row.prompt_length for row in rows], default=1) - 1
    seat: list[NDArray[np.int64]] = [np.zeros(0, np.int64)]
    place: list[NDArray[np.int64]] = [np.zeros(0, np.int64)]
    for at, row in enumerate(rows):
        inputs[at, : len(row.tokens)] = row.tokens
        seat.append(np.full(row.completion_length, at, np.int64))
        # The logits at position p predict token p + 1.
        place.append(np.arange(row.prompt_length - 1, len(row.tokens) - 1, dtype=np.int64) - first)
    empty = np.zeros(0, np.float32)

    def joined(parts: list[NDArray[np.float32]]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([empty, *parts])).to(device)

    def placed(parts: list[NDArray[np.int64]]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *parts])).to(device)

    return MicroBatch(
        inputs=torch.from_numpy(inputs).to(device),
        keep=longest - first,
        rows=placed(seat),
        places=placed(place),
        targets=placed([row.tokens[row.prompt_length :] for row in rows]),
        sampled=joined([row.logprobs for row in rows]),
        advantages=joined([np.full(row.completion_length, row.advantage, np.float32) for row in rows]),
        weights=joined([row.weights for row in rows]),
        staleness=placed([batch.policy_version - row.versions for row in rows]),
    )
