"""Strict JSON bodies: one object, no key twice, no NaN, the right content type."""

from __future__ import annotations

import json
from typing import Any

from fastapi import Request

from whimbrel.errors import UsageError


async def read_json_object(request: Request) -> dict[str, Any]:
    """The request's body.

    Raises:
        UsageError: it is no JSON object, repeats a key, or says it is something else.
    """
    media_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if media_type != "application/json":
        raise UsageError(
            f"The body's content type is {media_type or 'not given'}, not application/json.",
            hint="Send Content-Type: application/json.",
        )
    try:
        value = json.loads(await request.body(), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"The body is not strict JSON: {error}.", hint="Send one JSON object.") from error
    if not isinstance(value, dict):
        raise UsageError(f"The body is a {type(value).__name__}, not an object.", hint="Send one JSON object.")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} occurs twice")
        found[key] = value
    return found


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")
