"""A prompt group on its way through a rollout: prompted, sampled, scored."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

from agents.rollout.engines.base import Row
from agents.rollout.environments import Prompt, mix
from whimbrel.spec import RunSpec
from whimbrel.wire.payload import GroupPayload, Sample
from whimbrel.wire.work import GroupLease


@dataclass(eq=False)
class Group:
    """Owned by the generating thread."""

    lease: GroupLease
    partial: GroupPayload | None
    prompting: Future[Prompt]
    prompt: Prompt | None = None
    prompt_tokens: list[int] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    scoring: Future[list[float]] | None = None
    offered_tokens: int = 0
    """Tokens in the newest snapshot that was offered."""

    @property
    def group_id(self) -> str:
        return self.lease.group_id

    @property
    def tokens(self) -> int:
        return sum(len(row.tokens) for row in self.rows)

    @property
    def sampled(self) -> bool:
        """All samples have come to an end."""
        return bool(self.rows) and all(row.finish_reason for row in self.rows)

    def begin(self, spec: RunSpec, prompt: Prompt, prompt_tokens: list[int]) -> list[Row]:
        """Make the rows, with the prefixes of an earlier attempt; returns those that are to be sampled."""
        self.prompt, self.prompt_tokens = prompt, prompt_tokens
        prefixes: dict[int, Sample] = {}
        if self.partial is not None and self.partial.prompt_tokens == prompt_tokens:
            prefixes = {
                sample.sample: sample for sample in self.partial.samples if _usable(sample, spec.sampling.max_tokens)
            }
        self.partial = None
        for number in range(spec.algorithm.group_size):
            row = Row(
                group_id=self.group_id,
                sample=number,
                prompt=prompt_tokens,
                seed=mix(spec.seed, self.lease.index, number, self.lease.attempt),
                max_tokens=spec.sampling.max_tokens,
            )
            if number in prefixes:
                prefix = prefixes[number]
                row.tokens, row.logprobs = list(prefix.tokens), list(prefix.logprobs)
                row.spans, row.finish_reason = list(prefix.spans), prefix.finish_reason
            self.rows.append(row)
        return [row for row in self.rows if not row.finish_reason]

    def payload(self, sampler: dict[str, str], texts: list[str], rewards: list[float] | None = None) -> GroupPayload:
        """The group as it is now; with rewards when it is finished."""
        assert self.prompt is not None
        scores: list[float | None] = list(rewards) if rewards is not None else [None] * len(self.rows)
        return GroupPayload(
            group_id=self.group_id,
            index=self.lease.index,
            attempt=self.lease.attempt,
            prompt_tokens=self.prompt_tokens,
            samples=[row.as_sample(text, score) for row, text, score in zip(self.rows, texts, scores, strict=True)],
            sampler=sampler,
            prompt_text=self.prompt.text,
            answer=self.prompt.answer,
        )


def _usable(sample: Sample, max_tokens: int) -> bool:
    """Whether tokens, log-probs and spans agree, and the row is either finished or has room for more."""
    place = 0
    for span in sample.spans:
        if span.start != place or span.length < 1:
            return False
        place += span.length
    whole = len(sample.tokens) == len(sample.logprobs) == place
    if sample.finish_reason:
        return whole and 0 < place <= max_tokens
    return whole and place < max_tokens
