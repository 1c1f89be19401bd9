"""The keys below a prefix, kept current.

A view lists, then watches from that revision on. A broken stream, a compaction or an etcd that stopped answering makes
it list again, so the dictionary always converges to the truth; how it got there is not told, because everything that
reads a view is level-triggered. A view that is not `healthy` shows the last state known and proves nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from whimbrel.coordination.etcd import Compacted, Etcd, KeyValue, Watch
from whimbrel.errors import Unreachable
from whimbrel.limits import ETCD_PROBE_S, ETCD_RETRY_S, RELIST_EVERY_S


class PrefixView:
    """All keys with a prefix. To be used in one event loop; it owns a connection and a task."""

    def __init__(self, endpoints: Sequence[str], prefix: str) -> None:
        self.prefix = prefix
        self.items: dict[str, KeyValue] = {}
        self.revision = 0
        self.healthy = False
        self.last_confirmed = 0.0
        """Monotonic time of the last proof that `items` is current."""
        self.losses = 0
        """How often the view lost etcd."""
        self.on_change: list[Callable[[], None]] = []
        self._etcd = Etcd(endpoints)
        self._changed = asyncio.Event()
        self._ready = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin; returns at once."""
        self._task = asyncio.create_task(self._run(), name=f"view {self.prefix}")

    async def close(self) -> None:
        """End the task and the connection."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=2.0)
        await self._etcd.close()

    async def wait_ready(self, timeout_s: float) -> bool:
        """Wait for the first list; whether it came in time."""
        return await _within(self._ready, timeout_s)

    async def wait_change(self, timeout_s: float) -> bool:
        """Wait until items or health changed since the last call; whether that happened in time."""
        changed = await _within(self._changed, timeout_s)
        self._changed.clear()
        return changed

    async def _run(self) -> None:
        attempt = 0
        while True:
            try:
                await self._list()
                attempt = 0
                await self._follow()
            except Compacted:
                continue
            except Unreachable:
                if self.healthy:
                    self.healthy = False
                    self.losses += 1
                    self._tell()
                await asyncio.sleep(ETCD_RETRY_S[min(attempt, len(ETCD_RETRY_S) - 1)])
                attempt += 1

    async def _list(self) -> None:
        found, revision = await self._etcd.list(self.prefix)
        items = {item.key: item for item in found}
        # An etcd that came back with an older history would show a lower revision; its state is shown all the same,
        # and `revision` tells.
        different = items != self.items or not self.healthy
        self.items, self.revision = items, revision
        self._confirm()
        self._ready.set()
        if different:
            self._tell()

    async def _follow(self) -> None:
        watch = await self._etcd.watch(self.prefix, self.revision + 1)
        listed_at = time.monotonic()
        try:
            while time.monotonic() - listed_at < RELIST_EVERY_S:
                if not await self._take(watch):
                    # Silence proves nothing: a stopped etcd is silent too.
                    await self._etcd.get(self.prefix)
                    self._confirm()
        finally:
            watch.cancel()

    async def _take(self, watch: Watch) -> bool:
        changes = await watch.read(ETCD_PROBE_S)
        if changes is None:
            return False
        for change in changes:
            self.revision = max(self.revision, change.revision)
            if change.now is None:
                self.items.pop(change.key, None)
            else:
                self.items[change.key] = change.now
        self._confirm()
        if changes:
            self._tell()
        return True

    def _confirm(self) -> None:
        self.last_confirmed = time.monotonic()
        self.healthy = True

    def _tell(self) -> None:
        self._changed.set()
        for callback in self.on_change:
            callback()


async def _within(event: asyncio.Event, timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
