"""Ask silent agents directly: the second witness of a node's life. One question per node at a time, off the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from orchestrator.core.world import Probe
from whimbrel.clock import Clock
from whimbrel.errors import WhimbrelError
from whimbrel.limits import PROBE_TIMEOUT_S

Ask = Callable[[str], Awaitable[object]]
"""Asks the agent at host:port; any answer is a sign of life. Raises WhimbrelError, OSError or TimeoutError without one."""


class Probes:
    """Results of asking, per node."""

    def __init__(self, ask: Ask, clock: Clock, wake: Callable[[], None]) -> None:
        self.results: dict[str, Probe] = {}
        self._ask = ask
        self._clock = clock
        self._wake = wake
        self._asking: dict[str, asyncio.Task[None]] = {}

    def request(self, node_id: str, address: str) -> None:
        """Ask the node's agent unless a question is under way; the answer wakes the loop."""
        if node_id not in self._asking:
            task = asyncio.create_task(self._one(node_id, address), name=f"probe {node_id}")
            self._asking[node_id] = task
            task.add_done_callback(lambda _done: self._asking.pop(node_id, None))

    def forget(self) -> None:
        """A new term begins: what was heard before it proves nothing now."""
        self.results.clear()

    async def close(self) -> None:
        """End the questions under way."""
        tasks = list(self._asking.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=PROBE_TIMEOUT_S)

    async def _one(self, node_id: str, address: str) -> None:
        asked_at_s = self._clock.monotonic()
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                await self._ask(address)
            answered = True
        except (WhimbrelError, OSError, TimeoutError):
            answered = False
        before = self.results.get(node_id)
        failing_since_s = None
        if not answered:
            earlier = before.failing_since_s if before is not None else None
            failing_since_s = asked_at_s if earlier is None else earlier
        self.results[node_id] = Probe(asked_at_s, answered, failing_since_s)
        self._wake()
