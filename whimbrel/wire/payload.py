"""The content of a payload chunk: what the trainer needs of one prompt group. Stored by digest, apart from the ledger."""

from __future__ import annotations

import msgspec


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """Tokens [start, start + length) of a completion were sampled with this policy version."""

    version: int
    start: int
    length: int


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One trajectory, or as far as it came."""

    sample: int
    tokens: list[int]
    """Completion token ids, the end token included where one was sampled."""
    logprobs: list[float]
    """Log-probability of each token under the policy and temperature that sampled it; same length as `tokens`."""
    spans: list[VersionSpan]
    """In order, without gap, covering all tokens."""
    finish_reason: str = ""
    """`stop`, `length`, or empty while unfinished."""
    reward: float | None = None
    text: str = ""


class GroupPayload(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt and its samples."""

    group_id: str
    index: int
    attempt: int
    prompt_tokens: list[int]
    samples: list[Sample]
    sampler: dict[str, str] = {}
    """What really sampled the tokens: engine, dtype, KV policy, temperature."""
    prompt_text: str = ""
    answer: str = ""
