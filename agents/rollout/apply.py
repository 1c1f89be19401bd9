"""Following the weight log: fetch, verify and prepare in the background, patch the engine between two decode steps.

A thread of its own brings the verified host copy to each new head and queues what the engine must do: a patch, or a reload
after an anchor. The generating thread takes all that is queued at once, so that several versions cost one pause. The host
copy runs ahead of the engine, never behind it; what is not committed and verified never reaches the queue.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Protocol

import structlog

from agents.rollout.chunks import Chunks
from agents.rollout.engines.base import Engine
from whimbrel.checkpoint import HostWeights, LogReader, Manifest, Patch
from whimbrel.errors import ChainGap, Conflict, Corrupt, MissingChunk, Unreachable, WhimbrelError
from whimbrel.limits import FOLLOW_RETRY_S, HEAD_WAIT_S, PATCHES_QUEUED, VERSION_REPAIRS_MAX
from whimbrel.wire.cluster import Head

log = structlog.get_logger(__name__)


class HeadView(Protocol):
    """What is used of the worker's context."""

    run_id: str

    def wait_head(self, after_version: int, timeout_s: float) -> Head | None: ...


class Follower:
    """Keeps a host copy, and through it an engine, at the newest committed version."""

    def __init__(
        self,
        view: HeadView,
        chunks: Chunks,
        incident: Callable[[str, str], None],
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            incident: called with a kind and a sentence when something did not verify.
            on_ready: called from the follower's thread when `bring` has something to do.
        """
        self._view = view
        self._chunks = chunks
        self._incident = incident
        self._on_ready = on_ready
        self._lock = threading.Lock()  # over host copy and queue
        self._room = threading.Condition(self._lock)
        self._host = HostWeights(view.run_id)
        self._queue: list[Patch] = []
        self._reload = False
        self._files: dict[str, bytes] = {}
        self._committed_at: dict[int, str] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="follower", daemon=True)
        self.trouble = ""
        """Why newer versions cannot be had now; empty while all is well."""
        self.fetch_ms = 0.0
        self.prepare_ms = 0.0
        self.failure: BaseException | None = None

    @property
    def host(self) -> HostWeights:
        """The verified copy; read it only while the follower is closed or idle."""
        return self._host

    def start(self) -> None:
        """Begin to follow."""
        self._thread.start()

    def close(self) -> None:
        """End the thread; bounded wait."""
        self._ended.set()
        with self._room:
            self._room.notify_all()
        if self._thread.ident is not None:
            self._thread.join(timeout=5.0)

    def pending(self) -> bool:
        """Whether `bring` has something to do; cheap."""
        return self._reload or bool(self._queue) or self.failure is not None

    def bring(self, engine: Engine) -> dict[str, float]:
        """Apply all that is queued to the engine, between two decode steps; returns measurements for gauges."""
        if self.failure is not None:
            raise self.failure
        started = time.monotonic()
        before = engine.version
        with self._room:
            if self._reload or before < 0:
                self._load(engine)
            elif self._queue:
                patches, self._queue = self._queue, []
                assert patches[0].version == before + 1, "a patch was prepared for another version than the engine's"
                engine.apply(patches[-1].version, chain.from_iterable(patch.changes for patch in patches))
            self._room.notify_all()
            committed_at = self._committed_at.get(engine.version, "")
            self._committed_at = {v: at for v, at in self._committed_at.items() if v > engine.version}
        pause_ms = (time.monotonic() - started) * 1e3
        return {
            "apply_ms": pause_ms + self.prepare_ms,
            "generation_pause_ms": pause_ms,
            "fetch_ms": self.fetch_ms,
            **({"publish_to_applied_s": _age_s(committed_at)} if committed_at else {}),
        }

    def _load(self, engine: Engine) -> None:
        with tempfile.TemporaryDirectory(prefix="whimbrel-model-") as folder:
            for name, data in self._files.items():
                (Path(folder) / Path(name).name).write_bytes(data)
            engine.load(self._host.version, Path(folder), self._host.layout, self._host.tensors)
        self._queue, self._reload = [], False  # all of them are in the host copy

    # -- the follower's thread -----------------------------------------------------------------------------------------
    def _follow(self) -> None:
        misses = 0
        while not self._ended.is_set():
            head = self._view.wait_head(self._host.version, HEAD_WAIT_S)
            if head is None:
                continue
            try:
                self._advance(head, rebuild=misses >= VERSION_REPAIRS_MAX)
                misses, self.trouble = 0, ""
                self._on_ready()
            except (Corrupt, Conflict) as error:
                misses += 1
                self.trouble = error.message
                if (
                    misses <= VERSION_REPAIRS_MAX + 1
                ):  # one that never verifies is told once more and then only in the note
                    self._incident(
                        "corrupt_chunk", f"Version {head.version} did not verify and is fetched again: {error.message}"
                    )
                self._ended.wait(FOLLOW_RETRY_S if misses > VERSION_REPAIRS_MAX else 0.0)
            except (MissingChunk, ChainGap, Unreachable) as error:
                self.trouble = error.message
                log.warning("a version cannot be fetched now", version=head.version, error=error.message)
                self._ended.wait(FOLLOW_RETRY_S)
            except Exception as error:
                self.failure = error
                self._on_ready()
                return

    def _advance(self, head: Head, *, rebuild: bool) -> None:
        """Bring the host copy to the head and queue what the engine needs for it."""
        # A new reader each time: what it remembers of a long run would grow without end, and the cache has it anyway.
        reader = LogReader(self._chunks.fetch, self._view.run_id)
        self._committed_at[head.version] = head.committed_at
        if rebuild:
            self._rebuild(reader, head)
            return
        plan = reader.plan(head.manifest, self._host.manifest_digest)
        for digest, manifest in plan.steps:
            if self._ended.is_set():
                return
            if manifest.kind == "anchor":
                self._take_anchor(reader, digest, manifest)
            else:
                self._take_delta(digest, manifest)

    def _take_anchor(self, reader: LogReader, digest: str, manifest: Manifest) -> None:
        """Load a complete copy beside the one held, without the lock: generation must not wait for the transfer."""
        files = reader.files(manifest)
        host = HostWeights(self._view.run_id)
        host.load_anchor(digest, manifest, self._chunks.fetch)
        with self._lock:
            self._host, self._files, self._queue, self._reload = host, files or self._files, [], True

    def _take_delta(self, digest: str, manifest: Manifest) -> None:
        started = time.monotonic()
        wanted = manifest.chunk_digests()
        fetched = self._chunks.fetch(wanted)
        self.fetch_ms = (time.monotonic() - started) * 1e3
        started = time.monotonic()
        try:
            patch = self._host.prepare(digest, manifest, fetched)
        except Corrupt:
            self._chunks.forget(wanted)
            raise
        self.prepare_ms = (time.monotonic() - started) * 1e3
        with self._room:
            while len(self._queue) >= PATCHES_QUEUED and not self._reload and not self._ended.is_set():
                self._room.wait(HEAD_WAIT_S)
            self._host.commit(patch)
            if not self._reload:
                self._queue.append(patch)

    def _rebuild(self, reader: LogReader, head: Head) -> None:
        """Beyond repair by chunk: build a second host copy from an anchor, and take it only when it is at the head."""
        host = HostWeights(self._view.run_id)
        plan = reader.restore(host, head.manifest)
        _, anchor = reader.anchor_of(head.manifest)
        files = reader.files(anchor)
        with self._lock:
            self._host, self._files, self._queue, self._reload = host, files, [], True
        log.warning("the weights were loaded anew from an anchor", version=head.version, steps=len(plan.steps))


def _age_s(committed_at: str) -> float:
    """Seconds since a record's time; clocks of machines differ, so this is a measurement and never decides anything."""
    try:
        return max(0.0, (datetime.now(UTC) - datetime.fromisoformat(committed_at)).total_seconds())
    except ValueError as error:
        raise WhimbrelError(f"The head's time {committed_at!r} is no time.") from error
