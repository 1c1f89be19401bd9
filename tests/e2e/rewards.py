"""An environment for runs of minutes that a model without any training can score in: digits are good."""

from __future__ import annotations


class Digits:
    """The share of digits among the characters of a completion."""

    def prompt(self, index: int) -> dict[str, str]:
        return {"prompt": f"{index % 100} + {index % 7} =", "answer": "1"}

    def reward(self, index: int, completion: str) -> float:
        text = completion.strip()
        return sum(character.isdigit() for character in text) / len(text) if text else 0.0


def make() -> Digits:
    return Digits()
