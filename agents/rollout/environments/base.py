"""What a rollout asks of an environment: a prompt for an index, and a reward for a completion of it.

Laws of this seam. The same index gives the same prompt in every process, at any time. A reward is a judgement of the
completion; when none can be given (a crash, a timeout, a lost service) the environment raises `EnvironmentFailed`, and the
group is reported as failed: an outage is never trained on as a reward of 0.
"""

from __future__ import annotations

import hashlib
from typing import Protocol

import msgspec


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt, as chat messages; a tokenizer without chat template gets their contents joined by blank lines."""

    messages: list[dict[str, str]]
    answer: str = ""
    """The expected answer where there is a single one; only shown to people, never needed for scoring."""

    @property
    def text(self) -> str:
        return "\n\n".join(message["content"] for message in self.messages)


class Environment(Protocol):
    """Four verbs; implementations: procedural tasks (`procedural.py`), the user's own code (`user.py`)."""

    def prompt(self, index: int) -> Prompt:
        """The prompt at `index` >= 0, without upper bound. Raises EnvironmentFailed."""
        ...

    def score(self, index: int, completion: str) -> float:
        """The reward of a completion of prompt `index`; finite. Raises EnvironmentFailed."""
        ...

    def describe(self) -> str:
        """One line for people: what this environment is."""
        ...

    def close(self) -> None:
        """End what the environment started; may be called twice."""
        ...


def mix(seed: int, index: int, *more: int) -> int:
    """A well-mixed seed in [0, 2**31) from a few integers; the same on every machine and Python version."""
    text = ",".join(str(number) for number in (seed, index, *more))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") % 2**31


def as_messages(content: str, system_prompt: str | None) -> list[dict[str, str]]:
    """A user message, after the run's system prompt where there is one."""
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return [*system, {"role": "user", "content": content}]
