"""What goes over the network for a rollout, on a thread of its own: leases in, payloads and reports out.

The generating thread never waits for the controller. While it is away, leased groups are generated to their end, results
are kept (see `results.py`), and everything is reported when it is back: a report that was lost is simply sent again.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog

from agents.rollout.chunks import Chunks
from agents.rollout.results import Results
from whimbrel import limits, wire
from whimbrel.errors import Corrupt, Fenced, MissingChunk, Unreachable, WhimbrelError
from whimbrel.limits import AWAY_RETRY_S, COURIER_ROUND_S, HELD_CHECK_S, RENEW_EVERY_S
from whimbrel.wire.payload import GroupPayload
from whimbrel.wire.work import (
    Caller,
    GroupFailure,
    GroupLease,
    GroupPartial,
    GroupResult,
    LeaseReply,
    LeaseRequest,
    ReportReply,
    ReportRequest,
)

log = structlog.get_logger(__name__)


class Ledger(Protocol):
    """What is used of the controller's client; raises Unreachable and Fenced."""

    def lease(self, request: LeaseRequest) -> LeaseReply: ...

    def report(self, request: ReportRequest) -> ReportReply: ...


@dataclass(frozen=True)
class Arrival:
    """A group to begin, perhaps with what an earlier attempt had sampled."""

    lease: GroupLease
    partial: GroupPayload | None


@dataclass
class _Progress:
    attempt: int
    tokens: int = 0
    min_version: int = -1
    payload: str = ""
    data: bytes = b""
    """A snapshot that is not stored yet."""


@dataclass
class Desk:
    """What the generating thread tells the courier; plain values, each written by one thread."""

    version: int = -1
    open: bool = False
    """New groups may be leased: a version within the bound is applied, and the run is not paused."""


class Courier:
    """Start, then exchange through `arrivals`, `refused`, `results` and the methods; `failure` ends the worker."""

    def __init__(
        self,
        caller: Caller,
        ledger: Ledger,
        chunks: Chunks,
        results: Results,
        max_groups: int,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._caller = caller
        self._ledger = ledger
        self._chunks = chunks
        self._max_groups = max_groups
        self._wake = wake
        self.results = results
        self.desk = Desk()
        self.arrivals: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        self.refused: queue.SimpleQueue[str] = queue.SimpleQueue()
        """Groups in progress that were given to another: to be dropped."""
        self.failure: BaseException | None = None
        self.note = ""
        self.tokens_wasted = 0
        self._lock = threading.Lock()
        self._running: dict[str, _Progress] = {}
        self._work = threading.Event()
        self._ended = threading.Event()
        self._lease_at = self._renew_at = self._held_at = 0.0
        self._thread = threading.Thread(target=self._run, name="courier", daemon=True)

    def start(self) -> None:
        """Begin to lease and to report."""
        self._thread.start()

    def poke(self) -> None:
        """There is something to send, or room for new groups."""
        self._work.set()

    def end_group(self, group_id: str) -> None:
        """The group is no longer in progress: finished, failed or dropped."""
        with self._lock:
            self._running.pop(group_id, None)
        self.poke()

    def offer(self, payload: GroupPayload) -> None:
        """A snapshot of a group in progress, to be stored and reported with the next renewal."""
        versions = [span.version for sample in payload.samples for span in sample.spans]
        with self._lock:
            progress = self._running.get(payload.group_id)
            if progress is not None and versions:
                progress.tokens = sum(len(sample.tokens) for sample in payload.samples)
                progress.min_version = min(versions)
                progress.data = wire.encode_message(payload)

    def close(self, flush_s: float = 0.0) -> None:
        """End the thread; first try for `flush_s` to hand in what is finished and how far the rest came."""
        self._ended.set()
        self.poke()
        if self._thread.ident is not None:
            self._thread.join(timeout=max(flush_s, 0.1))
        if flush_s and not self._thread.is_alive() and self.failure is None:
            try:
                self._store()
                self._report(renew=True)
            except WhimbrelError as error:
                log.warning("the last report was not taken", error=str(error), held=len(self.results))

    # -- the courier's thread ------------------------------------------------------------------------------------------
    def _run(self) -> None:
        while not self._ended.is_set():
            self._work.wait(COURIER_ROUND_S)
            self._work.clear()
            if self._ended.is_set():
                return
            try:
                self._round(time.monotonic())
                self.note = "as many finished groups are held as may be; no new one is begun" if self._full() else ""
            except Unreachable as error:
                self.note = f"{error.message} {len(self.results)} finished groups are kept."
                self._ended.wait(AWAY_RETRY_S)
            except Exception as error:
                self.failure = error
                self._wake()
                return

    def _round(self, now: float) -> None:
        self._store()
        renew = now >= self._renew_at
        if renew or now >= self._held_at or self.results.unreported() or self.results.failures():
            self._report(renew=renew)
            self._held_at = now + HELD_CHECK_S
            if renew:
                self._renew_at = now + RENEW_EVERY_S
        room = self._max_groups - len(self._running)
        if self.desk.open and room > 0 and now >= self._lease_at and not self._full():
            self._lease(min(room, limits.LEASE_GROUPS_MAX))

    def _full(self) -> bool:
        return self.results.full()

    def _store(self) -> None:
        """Make payloads durable: finished ones first."""
        for held in self.results.unstored():
            digest = self._chunks.put(held.data)
            assert digest == held.result.payload, "the chunk server stored other bytes"
            held.stored = True

    def _report(self, *, renew: bool) -> None:
        named = [*self.results.unreported(), *self.results.failures(), *(self._renewals() if renew else [])]
        held = self.results.accepted()
        # Each report names a bounded number of groups. What would be too many goes with the next ones, at once: a lease
        # that had to wait for its renewal would be lost.
        for start in range(0, max(len(named), min(len(held), 1)), limits.REPORT_GROUPS_MAX):
            self._send(named[start : start + limits.REPORT_GROUPS_MAX], held if start == 0 else [])

    def _send(self, named: Sequence[GroupResult | GroupFailure | GroupPartial], held: list[str]) -> None:
        finished = [one for one in named if isinstance(one, GroupResult)]
        failed = [one for one in named if isinstance(one, GroupFailure)]
        partial = [one for one in named if isinstance(one, GroupPartial)]
        reply = self._ledger.report(
            ReportRequest(caller=self._caller, finished=finished, partial=partial, failed=failed, held=held)
        )
        self.tokens_wasted += self.results.settle(
            reply, [result.group_id for result in finished], [failure.group_id for failure in failed]
        )
        with self._lock:
            lost = [group_id for group_id in reply.refused if group_id in self._running]
        for group_id in lost:
            self.refused.put(group_id)
            self._wake()

    def _renewals(self) -> list[GroupPartial]:
        with self._lock:
            running = list(self._running.items())
        for _, progress in running:
            data = progress.data
            if data:
                progress.payload = self._chunks.put(data, lasting=False)
                if progress.data is data:
                    progress.data = b""
        return [
            GroupPartial(
                group_id=group_id,
                attempt=progress.attempt,
                tokens=progress.tokens,
                payload=progress.payload,
                min_version=progress.min_version,
            )
            for group_id, progress in running
        ]

    def _lease(self, capacity: int) -> None:
        request = LeaseRequest(caller=self._caller, policy_version=self.desk.version, capacity=capacity)
        reply = self._ledger.lease(request)
        if not reply.groups:
            self._lease_at = time.monotonic() + reply.retry_after_s
            return
        for lease in reply.groups:
            with self._lock:
                self._running[lease.group_id] = _Progress(attempt=lease.attempt)
            self.arrivals.put(Arrival(lease, self._prefix(lease)))
            self._wake()

    def _prefix(self, lease: GroupLease) -> GroupPayload | None:
        """What an earlier attempt had sampled, if it can be had; otherwise the group begins anew, which is only slower."""
        if not lease.partial:
            return None
        try:
            payload = wire.decode_message(self._chunks.fetch([lease.partial])[lease.partial], GroupPayload)
        except (MissingChunk, Unreachable, Corrupt) as error:
            log.warning("a partial group cannot be continued", group=lease.group_id, error=str(error))
            return None
        if payload.group_id != lease.group_id or payload.index != lease.index:
            log.warning("a partial is of another group", group=lease.group_id, found=payload.group_id)
            return None
        return payload


def raise_failure(failure: BaseException | None) -> None:
    """Raise what ended a thread, in the thread that ends the worker; Fenced stays Fenced."""
    if failure is None:
        return
    if isinstance(failure, Fenced):
        raise Fenced(failure.message, hint=failure.hint) from failure
    raise failure
