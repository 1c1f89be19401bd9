"""Waiting for what must come, with a deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


async def until(condition: Callable[[], bool], timeout_s: float = 15.0) -> float:
    """Wait for a condition; returns the seconds it took, fails when it does not come."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout_s, "the condition did not come true"
        await asyncio.sleep(0.02)
    return time.monotonic() - began
