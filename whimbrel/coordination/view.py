"""The keys below a prefix, kept current.

A view lists, then watches from that revision on. A broken stream, a compaction or an etcd that stopped answering makes
it list again, so the dictionary always converges to the truth; how it got there is not told, because everything that
reads a view is level-triggered. Events prove nothing about now: they may have waited, as this process may have been
stopped. So every ETCD_PROBE_S etcd is asked whether the view is current. A view that is not `healthy` shows the last
state known.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from whimbrel.coordination.etcd import Change, Compacted, Etcd, KeyValue, retry_pause_s
from whimbrel.errors import WhimbrelError
from whimbrel.limits import ETCD_PROBE_S, RELIST_EVERY_S
from whimbrel.log import get_logger

log = get_logger("view")


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

    @property
    def ended(self) -> bool:
        """Whether the view no longer follows: it was closed, or its task met a fault of this program."""
        return self._task is None or self._task.done()

    async def wait_ready(self, timeout_s: float) -> bool:
        """Wait for the first list; whether it came in time."""
        return await _within(self._ready, timeout_s)

    async def _run(self) -> None:
        attempt = 0
        while True:
            began_at = time.monotonic()
            try:
                await self._list()
                await self._follow()
            except Compacted:
                pass
            except WhimbrelError as error:
                self._lose(str(error))
            except Exception as error:
                # A view that ends silently would show the past for ever.
                log.exception("view starts anew", prefix=self.prefix)
                self._lose(str(error))
            # A pass that was over at once counts as a failure, so that no error can turn this loop into a flood.
            attempt = 0 if time.monotonic() - began_at >= ETCD_PROBE_S and self.healthy else attempt + 1
            if attempt:
                await asyncio.sleep(retry_pause_s(attempt - 1))

    async def _list(self) -> None:
        asked_at = time.monotonic()
        found, revision = await self._etcd.list(self.prefix)
        items = {item.key: item for item in found}
        # An etcd that came back with an older history would show a lower revision; its state is shown all the same,
        # and `revision` tells.
        different = items != self.items or not self.healthy
        self.items, self.revision = items, revision
        self.healthy, self.last_confirmed = True, asked_at
        self._ready.set()
        if different:
            self._tell()

    async def _follow(self) -> None:
        """Take changes until the next list is due or etcd has something that the watch did not tell."""
        watch = await self._etcd.watch(self.prefix, self.revision + 1)
        listed_at = time.monotonic()
        try:
            while time.monotonic() - listed_at < RELIST_EVERY_S:
                proof_in_s = self.last_confirmed + ETCD_PROBE_S - time.monotonic()
                if proof_in_s > 0:
                    self._take(await watch.read(proof_in_s) or [])
                elif not await self._prove():
                    return
        finally:
            watch.cancel()

    def _take(self, changes: list[Change]) -> None:
        for change in changes:
            self.revision = max(self.revision, change.revision)
            if change.now is None:
                self.items.pop(change.key, None)
            else:
                self.items[change.key] = change.now
        if changes:
            self._tell()

    async def _prove(self) -> bool:
        """Whether etcd has just these keys now: as many, and none that was written later than ours."""
        asked_at = time.monotonic()
        count, newest = await self._etcd.newest(self.prefix)
        current = count == len(self.items) and newest == max(
            (item.mod_revision for item in self.items.values()), default=0
        )
        if current:
            self.last_confirmed = asked_at
        return current

    def _lose(self, reason: str) -> None:
        if self.healthy:
            self.healthy = False
            self.losses += 1
            log.warning("etcd is lost from view", prefix=self.prefix, reason=reason)
            self._tell()

    def _tell(self) -> None:
        for callback in self.on_change:
            try:
                callback()
            except Exception:
                # The others must still hear of it, and the view must go on.
                log.exception("a callback failed", prefix=self.prefix)


async def _within(event: asyncio.Event, timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
