"""The rollout worker: registered → syncing → serving, then lease, sample, score, report, with new weights in between.

    follower thread ──patches──►  THIS LOOP  ◄──arrivals, refusals── courier thread ──► controller, chunk servers
                                  │      ▲
                                  ▼      │ prompts, rewards
                              environment thread

This loop alone touches the engine and the groups. It waits for nothing but its own engine, and looks between two decode
steps for whatever has come in. No group is leased before a committed version within the staleness bound is applied.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import structlog

from agents.rollout.apply import Follower
from agents.rollout.chunks import Chunks
from agents.rollout.courier import Arrival, Courier, raise_failure
from agents.rollout.engines.base import Engine, Row
from agents.rollout.environments import Environment
from agents.rollout.groups import Group
from agents.rollout.results import Results
from whimbrel.errors import EnvironmentFailed, LimitReached, UsageError
from whimbrel.limits import (
    ENVIRONMENT_FAILURES_MAX,
    ENVIRONMENT_RETRY_S,
    FLUSH_S,
    IDLE_WAIT_S,
    PARTIAL_EVERY_S,
    RATE_WINDOW_S,
    TELL_EVERY_S,
)
from whimbrel.spec import RunSpec
from whimbrel.wire.cluster import Head
from whimbrel.wire.work import Caller, Phase

log = structlog.get_logger(__name__)


class Place(Protocol):
    """What is used of the worker's context."""

    spec: RunSpec
    run_id: str
    caller: Caller
    paused: bool

    def check(self) -> None: ...

    def progress(
        self,
        phase: Phase,
        *,
        version: int | None = None,
        note: str | None = None,
        counters: dict[str, float] | None = None,
        gauges: dict[str, float] | None = None,
    ) -> None: ...

    def head(self) -> tuple[Head, int] | None: ...

    def wait_head(self, after_version: int, timeout_s: float) -> Head | None: ...


@dataclass
class Outage:
    """Failures of the environment since it last worked."""

    failures: int = 0
    reason: str = ""
    retry_at_s: float = 0.0
    """Monotonic; before it no new prompt is taken."""


class Rollout:
    """One rollout worker's working thread."""

    def __init__(
        self,
        place: Place,
        engine: Engine,
        environment: Environment,
        chunks: Chunks,
        courier: Callable[[Results, Callable[[], None]], Courier],
        incident: Callable[[str, str], None],
    ) -> None:
        self._place = place
        self._spec = place.spec
        self._engine = engine
        self._environment = environment
        self._chunks = chunks
        self._wake = threading.Event()
        self.courier = courier(Results(), self._wake.set)
        self.follower = Follower(place, chunks, incident, self._wake.set)
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="environment")
        self._groups: dict[str, Group] = {}
        self._counters: dict[str, float] = {}
        self._gauges: dict[str, float] = {}
        self._told_at = time.monotonic()
        self._snapshot_at = time.monotonic() + PARTIAL_EVERY_S
        self._told_bytes = self._told_wasted = self._tokens = 0
        self._incident = incident
        self._outage = Outage()

    def run(self) -> None:
        """Work until `check` raises. What is finished or begun is handed in before it ends, as far as that is possible."""
        self._place.progress("restoring", note="syncing: no version is applied yet")
        self.follower.start()
        self.courier.start()
        try:
            while True:
                self._place.check()
                self.turn()
        finally:
            self._snapshot()
            self._tell(time.monotonic())
            self.courier.close(FLUSH_S)
            self.follower.close()
            self._pool.shutdown(wait=False, cancel_futures=True)

    def turn(self) -> None:
        """Everything that may happen between two decode steps, and one decode step."""
        raise_failure(self.courier.failure)
        if self.follower.pending():
            self._apply()
        self._take_refusals()
        self._take_arrivals()
        self._take_prompts()
        sampled = self._sample()
        self._take_rewards()
        now = time.monotonic()
        if now >= self._snapshot_at:
            self._snapshot()
            self._snapshot_at = now + PARTIAL_EVERY_S
        if now - self._told_at >= TELL_EVERY_S:
            self._tell(now)
        if not sampled:
            self._wake.wait(IDLE_WAIT_S)
            self._wake.clear()

    # -- weights -------------------------------------------------------------------------------------------------------
    def _apply(self) -> None:
        before = self._engine.version
        self._place.progress("applying" if before >= 0 else "restoring")
        self._gauges.update(self.follower.bring(self._engine))
        pause_ms, fetch_ms = (round(self._gauges[name], 1) for name in ("generation_pause_ms", "fetch_ms"))
        log.info(f"version {self._engine.version} applied", pause_ms=pause_ms, fetch_ms=fetch_ms)
        self._count("versions_applied", max(1, self._engine.version - before) if before >= 0 else 1)
        self._place.progress(self._phase(), version=self._engine.version, note="")
        self._look()

    def _look(self) -> None:
        """Tell the courier whether new groups may be leased now."""
        head = self._place.head()
        behind = 0 if head is None else head[0].version - self._engine.version
        self.courier.desk.version = self._engine.version
        self.courier.desk.open = (
            self._engine.version >= 0
            and behind <= self._spec.staleness.max_versions
            and not self._place.paused
            and time.monotonic() >= self._outage.retry_at_s
        )

    # -- groups --------------------------------------------------------------------------------------------------------
    def _take_refusals(self) -> None:
        while not self.courier.refused.empty():
            group = self._groups.pop(self.courier.refused.get(), None)
            if group is not None:
                self._engine.drop(group.group_id)
                self._count("tokens_wasted", group.tokens)
                self.courier.end_group(group.group_id)

    def _take_arrivals(self) -> None:
        while not self.courier.arrivals.empty():
            arrival: Arrival = self.courier.arrivals.get()
            prompting = self._pool.submit(self._environment.prompt, arrival.lease.index)
            prompting.add_done_callback(lambda _future: self._wake.set())
            self._groups[arrival.lease.group_id] = Group(arrival.lease, arrival.partial, prompting)

    def _take_prompts(self) -> None:
        for group in list(self._groups.values()):
            if group.prompt is not None or not group.prompting.done():
                continue
            try:
                prompt = group.prompting.result()
            except EnvironmentFailed as error:
                self._fail(group, error)
                continue
            tokens = self._engine.encode(prompt.messages)
            if not tokens:
                self._fail(group, EnvironmentFailed(f"The prompt {group.lease.index} is empty."))
                continue
            begun = group.begin(self._spec, prompt, tokens)
            self._engine.add(begun)
            if not begun:
                self._score(group)

    def _sample(self) -> bool:
        """One decode step; whether there was anything to do."""
        if self._engine.version < 0 or not any(row for group in self._groups.values() for row in _open(group)):
            return False
        rows = sum(len(_open(group)) for group in self._groups.values())
        finished = self._engine.step()
        self._tokens += rows
        self._count("tokens_generated", rows)
        for group_id in {row.group_id for row in finished}:
            group = self._groups[group_id]
            if group.sampled:
                self._score(group)
        return True

    def _score(self, group: Group) -> None:
        texts = [self._engine.decode(row.tokens) for row in group.rows]
        index = group.lease.index
        group.scoring = self._pool.submit(lambda: [self._environment.score(index, text) for text in texts])
        group.scoring.add_done_callback(lambda _future: self._wake.set())

    def _take_rewards(self) -> None:
        for group in list(self._groups.values()):
            if group.scoring is None or not group.scoring.done():
                continue
            try:
                payload = group.payload(self._engine.describe(), self._texts(group), group.scoring.result())
                self.courier.results.finish(payload)
            except (EnvironmentFailed, LimitReached) as error:
                self._fail(group, error)
                continue
            self._outage = Outage()
            del self._groups[group.group_id]
            self._count("groups_finished", 1)
            self.courier.end_group(group.group_id)

    def _fail(self, group: Group, error: EnvironmentFailed | LimitReached) -> None:
        """An outage of the environment is reported as such, and is never a reward."""
        log.warning("a group failed", group=group.group_id, index=group.lease.index, error=str(error))
        self._engine.drop(group.group_id)
        self._count("tokens_wasted", group.tokens)
        del self._groups[group.group_id]
        self.courier.results.fail(group.group_id, group.lease.attempt, error.message)
        self.courier.end_group(group.group_id)
        if isinstance(error, EnvironmentFailed):
            self._judge(error)

    def _judge(self, error: EnvironmentFailed) -> None:
        """Tell an environment that cannot work from one that is away for a while.

        Raises:
            UsageError: it failed many times in a row, and nothing was ever trained on what it gave.
        """
        outage = self._outage
        outage.failures += 1
        outage.reason = error.message
        if outage.failures < ENVIRONMENT_FAILURES_MAX:
            return
        text = f"The environment failed for {outage.failures} prompt groups in a row: {error.message}"
        if self._engine.version == 0:
            raise UsageError(text, hint="Correct it; `whimbrel run logs RUN -w WORKER` has the tracebacks.")
        outage.retry_at_s = time.monotonic() + ENVIRONMENT_RETRY_S
        self._look()  # at once: each group leased meanwhile would only be another attempt that fails
        if outage.failures == ENVIRONMENT_FAILURES_MAX:
            # Beside the loop, which waits for nothing but its engine.
            self._pool.submit(self._incident, "environment_failed", f"{text} Its prompts are tried again.")

    def _snapshot(self) -> None:
        """Offer how far the groups in progress came, where that is more than before."""
        for group in self._groups.values():
            tokens = group.tokens
            if tokens > group.offered_tokens:
                group.offered_tokens = tokens
                self.courier.offer(group.payload(self._engine.describe(), self._texts(group)))

    def _texts(self, group: Group) -> list[str]:
        return [self._engine.decode(row.tokens) if row.finish_reason else "" for row in group.rows]

    def _phase(self) -> Phase:
        """Working while there is something to sample. The environment may take as long as its own bound allows for each
        call: who waits for it does not hang."""
        return "working" if any(_open(group) for group in self._groups.values()) else "waiting"

    # -- telling -------------------------------------------------------------------------------------------------------
    def _count(self, name: str, amount: float) -> None:
        self._counters[name] = self._counters.get(name, 0.0) + amount

    def _smooth(self, tokens: int, elapsed_s: float) -> float:
        """Tokens per second, averaged over about RATE_WINDOW_S: a worker that waits for its next version is not at 0."""
        before = self._gauges.get("tokens_per_s", 0.0)
        weight = 1.0 - math.exp(-elapsed_s / RATE_WINDOW_S)
        return before + weight * (tokens / elapsed_s - before)

    def _tell(self, now: float) -> None:
        self._look()
        self._gauges["tokens_per_s"] = self._smooth(self._tokens, max(now - self._told_at, 1e-3))
        self._count("payload_bytes_received", self._chunks.bytes_received - self._told_bytes)
        self._count("tokens_wasted", self.courier.tokens_wasted - self._told_wasted)
        self._told_bytes, self._told_wasted = self._chunks.bytes_received, self.courier.tokens_wasted
        self._tokens, self._told_at = 0, now
        counters = {name: amount for name, amount in self._counters.items() if amount}
        self._counters = {}
        phase = self._phase()
        note = self.follower.trouble or self._outage.reason or self.courier.note
        if self._groups and phase == "waiting":
            note = note or "waiting for the environment"
        if self._engine.version < 0:
            phase = "restoring" if self._place.head() is not None else "waiting"
            note = note or "syncing: no version is applied yet"
        self._place.progress(phase, version=self._engine.version, note=note, counters=counters, gauges=self._gauges)


def _open(group: Group) -> list[Row]:
    return [row for row in group.rows if not row.finish_reason]
