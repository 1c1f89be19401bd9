"""An environment in plain Python: give back a few digits in reverse order. See docs/environments.md."""

from __future__ import annotations

import random


class Reverse:
    """Digits to be reversed; a part of the reward for each digit in its place."""

    def __init__(self, length: int, seed: int) -> None:
        self.length = length
        self.seed = seed

    def prompt(self, index: int) -> dict[str, str]:
        """The same index always gives the same digits: everything random comes from the seed and the index."""
        digits = self._digits(index)
        return {"prompt": f"Write these digits in reverse order: {digits} =", "answer": digits[::-1]}

    def reward(self, index: int, completion: str) -> float:
        """From 0 to 1."""
        wanted = self._digits(index)[::-1]
        found = completion.strip()
        if len(found) != len(wanted):
            return 0.0
        return sum(a == b for a, b in zip(found, wanted, strict=True)) / len(wanted)

    def _digits(self, index: int) -> str:
        chance = random.Random(f"{self.seed}/{index}")
        return "".join(chance.choice("0123456789") for _ in range(self.length))


def make(length: int = 3, seed: int = 0) -> Reverse:
    """What `environment.entry` names; gets environment.params, and the run's seed because it asks for one."""
    return Reverse(length, seed)
