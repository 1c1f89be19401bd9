"""The seam between a rollout's loop and what samples tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from whimbrel.delta import Bits, Change, Layout
from whimbrel.wire.payload import Sample, VersionSpan


@dataclass(eq=False)
class Row:
    """One completion in progress. The engine appends to it; `tokens`, `logprobs` and `spans` always agree."""

    group_id: str
    sample: int
    prompt: list[int]
    seed: int
    """With the position in the completion it decides each draw, whatever else is in the batch."""
    max_tokens: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Of each token under the policy and temperature that drew it."""
    spans: list[VersionSpan] = field(default_factory=list)
    finish_reason: str = ""

    def append(self, token: int, logprob: float, version: int) -> None:
        """Add one token drawn with this policy version."""
        last = self.spans[-1] if self.spans else None
        if last is not None and last.version == version:
            self.spans[-1] = VersionSpan(version, last.start, last.length + 1)
        else:
            self.spans.append(VersionSpan(version, len(self.tokens), 1))
        self.tokens.append(token)
        self.logprobs.append(logprob)

    def as_sample(self, text: str = "", reward: float | None = None) -> Sample:
        """A copy that later tokens do not change."""
        return Sample(
            sample=self.sample,
            tokens=list(self.tokens),
            logprobs=list(self.logprobs),
            spans=list(self.spans),
            finish_reason=self.finish_reason,
            reward=reward,
            text=text,
        )


class Engine(Protocol):
    """Eight verbs. Not thread-safe: one thread drives an engine, and weights change only between two steps."""

    version: int
    """The policy version whose bits the engine holds completely; -1 while there is none."""

    def load(self, version: int, files: Path, layout: Layout, tensors: Mapping[str, Bits]) -> None:
        """Make the model from a folder with config and tokenizer, and fill it with these bits. Keeps running rows."""
        ...

    def apply(self, version: int, changes: Iterable[Change]) -> None:
        """Overwrite what a verified patch changes, in place, and treat the running rows' KV cache by the run's policy."""
        ...

    def encode(self, messages: list[dict[str, str]]) -> list[int]:
        """Tokens of a prompt, ready to be answered."""
        ...

    def decode(self, tokens: list[int]) -> str:
        """Text of a completion without special tokens."""
        ...

    def add(self, rows: Iterable[Row]) -> None:
        """Rows that take part from the next step on; those with tokens are continued."""
        ...

    def step(self) -> list[Row]:
        """Draw one token for every row; returns the rows that are finished now, which leave the batch."""
        ...

    def drop(self, group_id: str) -> int:
        """Forget the rows of a group; returns how many tokens they had."""
        ...

    def describe(self) -> dict[str, str]:
        """What really samples: engine, dtype, KV policy, temperature."""
        ...
