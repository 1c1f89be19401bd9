"""Identifiers: readable prefix, then a UUIDv7, so that they sort by the time they were made."""

from __future__ import annotations

import re

import uuid_utils

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford base 32: no i, l, o, u
_LENGTH = 26
ID_PATTERN = re.compile(r"^[a-z]+_[0-9a-hjkmnp-tv-z]{26}$")
NAME_PATTERN = re.compile(r"^[a-z0-9]([a-z0-9-]{0,62}[a-z0-9])?$")


def new_id(prefix: str) -> str:
    """Return a new identifier such as `run_06a3…`: sortable, unique, safe in paths and URLs."""
    number: int = uuid_utils.uuid7().int
    digits: list[str] = []
    for _ in range(_LENGTH):
        number, digit = divmod(number, 32)
        digits.append(_ALPHABET[digit])
    return f"{prefix}_{''.join(reversed(digits))}"


def is_id(text: str, prefix: str) -> bool:
    """Whether `text` has the form of an identifier with this prefix."""
    return text.startswith(prefix + "_") and ID_PATTERN.match(text) is not None


def is_name(text: str) -> bool:
    """Whether `text` may name a run, node or worker: lower case, digits, inner hyphens, at most 64 characters."""
    return NAME_PATTERN.match(text) is not None
