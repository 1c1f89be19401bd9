"""A record in etcd that lives as long as its owner: a key under a lease, renewed by a thread of its own.

The thread has its own event loop and its own connection, so that neither a blocked main loop nor a busy one lets the
lease lapse. Time is judged with this process's monotonic clock: `valid()` turns false LEASE_MARGIN_S before etcd can
have let the lease expire, whatever happened to the wall clock or to this process meanwhile.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence

from whimbrel.coordination.etcd import Compare, Etcd, Put
from whimbrel.errors import Fenced, Unreachable
from whimbrel.limits import ETCD_RETRY_S, LEASE_MARGIN_S, LEASE_START_TIMEOUT_S
from whimbrel.log import get_logger

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
        """How often the lease was found gone and the same record was put again."""
        self._endpoints = list(endpoints)
        self._value = value
        self._guard = guard
        self._on_fenced = on_fenced
        self._deadline = 0.0
        self._first = threading.Event()
        self._failure: Exception | None = None
        self._stopping = threading.Event()
        self._revoke = True
        self._dirty = False
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
            self.close(revoke=False)
            raise Unreachable(f"No lease for {self.key} within {timeout_s:.0f} s.", hint="Is etcd running?")
        if self._failure is not None:
            raise self._failure

    def remaining_s(self) -> float:
        """Seconds until the lease may have expired, less the safety margin; negative when it may have."""
        return self._deadline - time.monotonic() - LEASE_MARGIN_S

    def valid(self) -> bool:
        """Whether the lease certainly still stands."""
        return self.remaining_s() > 0 and not self._stopping.is_set()

    def update(self, value: bytes) -> None:
        """Replace the record's value soon."""
        self._value = value
        self._dirty = True
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
        self._wake = lambda: loop.call_soon_threadsafe(woken.set)
        try:
            await self._keep_until_stopped(woken)
        finally:
            self._wake = lambda: None

    async def _keep_until_stopped(self, woken: asyncio.Event) -> None:
        etcd = Etcd(self._endpoints)
        attempt = 0
        while not self._stopping.is_set():
            try:
                await self._once(etcd)
                attempt = 0
                # Half of what remains, so that a missed renewal leaves time for several more.
                pause = max(0.1, min(self.ttl_s / 3, (self._deadline - time.monotonic()) / 2))
            except Fenced as error:
                self._fail(error)
                break
            except Unreachable:
                pause = ETCD_RETRY_S[min(attempt, len(ETCD_RETRY_S) - 1)]
                attempt += 1
            except Exception:
                # Whatever it was, a keeper that ends silently is worse than one that tries again.
                log.exception("lease could not be renewed", key=self.key)
                pause = ETCD_RETRY_S[-1]
            woken.clear()
            if not self._stopping.is_set() and not self._dirty:
                try:
                    async with asyncio.timeout(pause):
                        await woken.wait()
                except TimeoutError:
                    continue
        await self._leave(etcd)

    async def _once(self, etcd: Etcd) -> None:
        asked_at = time.monotonic()  # before the call: etcd cannot have counted from earlier
        remaining = await etcd.refresh_lease(self.lease) if self.lease else 0
        if remaining <= 0:
            await self._register(etcd)
        else:
            self._deadline = asked_at + remaining
            if self._dirty:
                self._dirty = False
                await self._put(etcd, self.lease)
            elif await etcd.get(self.key) is None:  # removed by someone although the lease lives
                self.re_registrations += 1
                await self._put(etcd, self.lease)
        self._first.set()

    async def _register(self, etcd: Etcd) -> None:
        again = self.lease != 0
        asked_at = time.monotonic()
        lease = await etcd.grant_lease(self.ttl_s)
        await self._put(etcd, lease)
        self.lease = lease
        self._deadline = asked_at + self.ttl_s
        if again:
            self.re_registrations += 1

    async def _put(self, etcd: Etcd, lease: int) -> None:
        guards = [self._guard] if self._guard is not None else []
        done = await etcd.txn(guards, [Put(self.key, self._value, lease)])
        if not done.succeeded:
            await etcd.revoke_lease(lease)
            raise Fenced(f"{self.key} belongs to a newer owner.", hint="This process stops and writes nothing more.")
        self.revision = done.revision

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
