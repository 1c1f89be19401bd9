"""Batches ahead of the trainer: a thread asks the controller for the next steps' batches and fetches their payloads.

So the trainer works on for a while when the controller is away (law 5). Nothing is consumed by being fetched: the commit of
the step does that, and until then the same step is answered with the same batch.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from agents.trainer.batch import check_sample
from agents.trainer.place import ChunkSources, Controller, Incidents
from whimbrel import wire
from whimbrel.errors import Corrupt, MissingChunk, StorageFull, Unreachable
from whimbrel.limits import BATCH_RETRY_S
from whimbrel.wire.payload import GroupPayload
from whimbrel.wire.work import BatchGroup, BatchRequest, Caller


@dataclass(frozen=True)
class FetchedBatch:
    """The batch of one step with its payloads, in training order."""

    step: int
    groups: tuple[BatchGroup, ...]
    payloads: tuple[bytes, ...]

    def decode(self) -> list[GroupPayload]:
        """The groups' content. Raises Corrupt."""
        return [wire.decode_message(data, GroupPayload) for data in self.payloads]


class BatchFetcher:
    """Fetches wanted steps in order, in its own thread."""

    def __init__(
        self, controller: Controller, caller: Caller, chunks: ChunkSources, incidents: Incidents, vocabulary: int
    ) -> None:
        self._controller = controller
        self._caller = caller
        self._chunks = chunks
        self._incidents = incidents
        self._vocabulary = vocabulary
        self._changed = threading.Condition()
        self._wanted: list[int] = []
        self._ready: dict[int, FetchedBatch] = {}
        self._failure: BaseException | None = None
        self._closed = False
        self.reason = ""
        """Why the next batch is not here yet; one sentence."""
        self._thread = threading.Thread(target=self._run, name="batches", daemon=True)
        self._thread.start()

    def want(self, step: int) -> None:
        """Have a step's batch fetched; again is no harm."""
        with self._changed:
            if step not in self._wanted and step not in self._ready:
                self._wanted.append(step)
                self._changed.notify_all()

    def take(self, step: int, timeout_s: float) -> FetchedBatch | None:
        """The step's batch, or None when it is not here within the time; `reason` says why.

        Raises:
            Whatever ended the thread: Fenced, an error that asking again cannot cure.
        """
        self.want(step)
        with self._changed:
            self._changed.wait_for(lambda: step in self._ready or self._failure is not None, timeout_s)
            if self._failure is not None:
                raise self._failure
            return self._ready.pop(step, None)

    def close(self) -> None:
        """End the thread; it may take as long as the request in flight."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            while (step := self._next()) is not None:
                fetched = self._fetch(step)
                with self._changed:
                    self._wanted.remove(step)
                    if fetched is not None:
                        self._ready[step] = fetched
                    self._changed.notify_all()
        except BaseException as error:  # handed to the trainer's thread by `take`
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _next(self) -> int | None:
        with self._changed:
            self._changed.wait_for(lambda: self._wanted or self._closed)
            return None if self._closed else self._wanted[0]

    def _fetch(self, step: int) -> FetchedBatch | None:
        missing: list[str] = []
        while not self._closed:
            try:
                reply = self._controller.batch(BatchRequest(caller=self._caller, step=step, missing=missing))
                missing = []
                if reply.ready:
                    payloads, missing = self._payloads(step, reply.groups)
                    if not missing:
                        self.reason = ""
                        return FetchedBatch(step, tuple(reply.groups), tuple(payloads))
                    self.reason = (
                        f"{len(missing)} prompt groups of step {step} are held by nobody and are sampled again."
                    )
                else:
                    self.reason = reply.reason
                    self._pause(reply.retry_after_s)
            except (Unreachable, StorageFull) as error:
                self.reason = str(error)
                self._pause(BATCH_RETRY_S)
        return None

    def _payloads(self, step: int, groups: Sequence[BatchGroup]) -> tuple[list[bytes], list[str]]:
        """Payloads in order, and the groups that cannot be had or cannot be used."""
        payloads: list[bytes] = []
        missing: list[str] = []
        for group in groups:
            try:
                data = self._chunks.fetch([group.payload])[group.payload]
                self._check(step, group, data)
                payloads.append(data)
            except MissingChunk:
                missing.append(group.group_id)
            except Corrupt as error:
                missing.append(group.group_id)
                self._incidents.report("corrupt_chunk", f"Prompt group {group.group_id} is not used: {error.message}")
        return payloads, missing

    def _check(self, step: int, group: BatchGroup, data: bytes) -> None:
        content = wire.decode_message(data, GroupPayload)
        if content.group_id != group.group_id or not content.samples:
            raise Corrupt(f"The payload of {group.group_id} is that of {content.group_id!r}.")
        for sample in content.samples:
            check_sample(content, sample, step, self._vocabulary)

    def _pause(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed, max(0.05, seconds))
