"""Idempotency-Key: the same key and request get the same answer; the same key with another request is an error."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any, Protocol

from fastapi import Request
from fastapi.responses import JSONResponse

from whimbrel.clock import SystemClock
from whimbrel.errors import Conflict, UsageError
from whimbrel.limits import HEADER_MAX_CHARS, IDEMPOTENCY_KEPT_S

HEADER = "Idempotency-Key"
Answer = tuple[int, dict[str, Any], dict[str, str]]
"""Status, body, headers."""


class KeyStore(Protocol):
    """Where answers are kept; the runs' repository."""

    async def remember(
        self, key: str, request_digest: str, status: int, body: dict[str, Any], headers: dict[str, Any]
    ) -> Any: ...

    async def recall(self, key: str) -> Any: ...

    async def prune_keys(self, before: Any) -> Any: ...


_turn = asyncio.Lock()
"""One keyed request of this process at a time: the second of two equal ones finds the answer of the first."""


async def answer_once(
    request: Request, body: dict[str, Any], store: KeyStore, make: Callable[[], Awaitable[Answer]]
) -> JSONResponse:
    """Answer with what `make` does, or with the answer that this key got before.

    Raises:
        UsageError: the key is too long, or was used for another request.
    """
    key = request.headers.get(HEADER, "")
    if not key:
        return _response(await make())
    if len(key) > HEADER_MAX_CHARS or not key.isprintable():
        raise UsageError(f"{HEADER} is longer than {HEADER_MAX_CHARS} characters.", hint="Use a UUID.")
    digest = _digest(request, body)
    async with _turn:
        known = await store.recall(key)
        if known is None:
            await store.prune_keys(SystemClock().wall() - timedelta(seconds=IDEMPOTENCY_KEPT_S))
            try:
                answer = await make()
            except Conflict:
                known = await store.recall(key)  # another controller may have answered the same request just now
                if known is None:
                    raise
            else:
                await store.remember(key, digest, *answer)
                return _response(answer)
    if known.request_digest != digest:
        raise UsageError(
            f"The {HEADER} {key} was used for another request.", hint="Use a new key for each new request."
        )
    return _response((known.status, known.body, known.headers), replayed=True)


def _digest(request: Request, body: dict[str, Any]) -> str:
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(f"{request.method} {request.url.path}\n{canonical}".encode()).hexdigest()


def _response(answer: Answer, *, replayed: bool = False) -> JSONResponse:
    status, body, headers = answer
    extra = {"Idempotent-Replayed": "true"} if replayed else {}
    return JSONResponse(body, status_code=status, headers={**headers, **extra})
