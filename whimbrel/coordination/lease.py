"""A record in etcd that lives as long as its owner: a key under a lease, renewed by a thread of its own.

The thread has its own event loop and its own connection, so that neither a blocked main loop nor a busy one lets the
lease lapse. Time is judged with this process's monotonic clock: `valid()` turns false LEASE_MARGIN_S before etcd can
have let the lease expire, whatever happened to the wall clock or to this process meanwhile.

The newest announcement of a key wins. A keeper that finds its key under a lease of somebody else steps back: for good if
it has a guard, else until the key is free again.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from whimbrel.coordination.etcd import Compare, Etcd, KeyValue, Put, retry_pause_s
from whimbrel.errors import Fenced, NotFound, Unreachable
from whimbrel.limits import LEASE_MARGIN_S, LEASE_START_TIMEOUT_S, OWN_LEASES_KEPT
from whimbrel.log import get_logger

_CLOCK: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""Monotonic, and where there is one, the clock that goes on while the machine sleeps: etcd's clock does."""

log = get_logger("lease")


class LeaseKeeper:
    """Keeps one key alive. Start it once; methods are thread-safe."""

    def __init__(
        self,
        endpoints: Sequence[str],
        key: str,
        value: bytes,
        ttl_s: int,
        *,
        guard: Compare | None = None,
        on_fenced: Callable[[str], None] | None = None,
    ) -> None:
        self.key = key
        self.ttl_s = ttl_s
        self.lease = 0
        self.revision = 0
        """mod_revision of the key as this keeper last put it."""
        self.re_registrations = 0
        """How often the lease or the key was found gone and the same record was put again."""
        self.displaced = False
        """Whether the key is somebody else's now."""
        self._endpoints = list(endpoints)
        self._value = value
        self._guard = guard
        self._on_fenced = on_fenced
        self._ours: deque[int] = deque(maxlen=OWN_LEASES_KEPT)
        self._deadline = 0.0
        self._first = threading.Event()
        self._failure: Exception | None = None
        self._stopping = threading.Event()
        self._revoke = True
        self._wake: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._keep()), name=f"lease {key}", daemon=True)

    def start(self, timeout_s: float = LEASE_START_TIMEOUT_S) -> None:
        """Put the record and keep it.

        Raises:
            Fenced: the guard does not hold.
            Unreachable: etcd did not answer in time.
        """
        self._thread.start()
        if not self._first.wait(timeout_s):
            self.close()  # if the put comes through after all, it is taken back
            raise Unreachable(f"No lease for {self.key} within {timeout_s:.0f} s.", hint="Is etcd running?")
        if self._failure is not None:
            raise self._failure

    def remaining_s(self) -> float:
        """Seconds until the lease may have expired, less the safety margin; negative when it may have."""
        return self._deadline - _now_s() - LEASE_MARGIN_S

    def valid(self) -> bool:
        """Whether the lease certainly still stands."""
        return self.remaining_s() > 0 and not self._stopping.is_set()

    def update(self, value: bytes) -> None:
        """Replace the record's value soon."""
        self._value = value
        self._wake()

    def close(self, *, revoke: bool = True) -> None:
        """End the thread; `revoke` removes the record at once instead of letting it expire."""
        self._revoke = revoke
        self._stopping.set()
        self._wake()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout=5.0)

    # -- the thread ----------------------------------------------------------------------------------------------------
    async def _keep(self) -> None:
        loop = asyncio.get_running_loop()
        woken = asyncio.Event()

        def wake() -> None:
            try:
                loop.call_soon_threadsafe(woken.set)
            except RuntimeError:
                pass  # the loop ended just now, and with it what would be woken

        self._wake = wake
        try:
            await self._keep_until_stopped(woken)
        finally:
            self._wake = lambda: None

    async def _keep_until_stopped(self, woken: asyncio.Event) -> None:
        etcd = Etcd(self._endpoints)
        failures = 0
        while not self._stopping.is_set():
            try:
                await self._once(etcd)
                failures = 0
                # Half of what remains, so that a missed renewal leaves time for several more.
                pause_s = max(0.1, min(self.ttl_s / 3, (self._deadline - _now_s()) / 2))
            except Fenced as error:
                self._fail(error)
                break
            except (Unreachable, NotFound):
                pause_s = retry_pause_s(failures)
                failures += 1
            except Exception:
                # Whatever it was, a keeper that ends silently is worse than one that tries again.
                log.exception("lease could not be renewed", key=self.key)
                pause_s = retry_pause_s(failures)
                failures += 1
            try:
                async with asyncio.timeout(pause_s):
                    await woken.wait()
            except TimeoutError:
                pass
            woken.clear()
        await self._leave(etcd)

    async def _once(self, etcd: Etcd) -> None:
        asked_at = _now_s()  # before the call: etcd cannot have counted from earlier
        lasts_s = await etcd.refresh_lease(self.lease) if self.lease else 0
        found = await etcd.get(self.key) if self.revision else None
        if found is not None and found.lease not in self._ours:
            self._step_back()
            return
        if lasts_s <= 0:
            asked_at, lasts_s = _now_s(), self.ttl_s
            lease = await etcd.grant_lease(self.ttl_s)
            self._ours.append(lease)
            await self._put(etcd, lease, found)
        elif found is None or found.lease != self.lease or found.value != self._value:
            await self._put(etcd, self.lease, found)
        self.displaced = False
        self._deadline = asked_at + lasts_s
        self._first.set()

    async def _put(self, etcd: Etcd, lease: int, found: KeyValue | None) -> None:
        """Put the record. `found` is what the key was just now; at the first time, what it was does not matter."""
        again = self.revision != 0
        compares = [self._guard] if self._guard is not None else []
        if again:
            compares.append(Compare(self.key, "mod", found.mod_revision if found is not None else 0))
        done = await etcd.txn(compares, [Put(self.key, self._value, lease)])
        if not done.succeeded:
            await self._refuse_or_retry(etcd, lease)
        self.lease, self.revision = lease, done.revision
        if again and found is None:
            self.re_registrations += 1

    async def _refuse_or_retry(self, etcd: Etcd, lease: int) -> None:
        if lease != self.lease:
            await etcd.revoke_lease(lease)
        if self._guard is not None and not self._guard.holds(await etcd.get(self._guard.key)):
            raise Fenced(f"{self.key} belongs to a newer owner.", hint="This process stops and writes nothing more.")
        raise Unreachable(f"{self.key} changed while it was put.", hint="It is looked at again.")

    def _step_back(self) -> None:
        self._deadline = 0.0
        if self._guard is not None:
            raise Fenced(f"{self.key} was taken by another holder.", hint="This process stops and writes nothing more.")
        if not self.displaced:
            log.warning("another process holds this key; its record stays until it goes", key=self.key)
        self.displaced = True

    def _fail(self, error: Fenced) -> None:
        self._deadline = 0.0
        self._failure = error
        self._first.set()
        if self._on_fenced is not None:
            self._on_fenced(error.message)

    async def _leave(self, etcd: Etcd) -> None:
        if self._revoke and self.lease and self._failure is None:
            try:
                await etcd.revoke_lease(self.lease)
            except Unreachable:
                pass  # it expires by itself
        self._deadline = 0.0
        await etcd.close()


def _now_s() -> float:
    return time.clock_gettime(_CLOCK)
