"""From a finished step to a committed version: chunks, manifest, commit, and only then the comparison base advances.

Every rank writes its own chunks; rank 0 joins them and commits; all ranks learn the outcome. A full store or an absent etcd
makes the step wait, within PUBLISH_WAIT_MAX_S; the version before stays what it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from agents.trainer.optimizer import MasterOptimizer
from agents.trainer.place import Incidents, Place
from whimbrel.checkpoint import Manifest, StepRecord, WeightLog, apply_retention, wants_anchor
from whimbrel.commit import HeadCommitter
from whimbrel.delta import EncodedDelta, Piece, advance
from whimbrel.errors import Conflict, Fenced, StorageFull, TimedOut, Unreachable, WhimbrelError
from whimbrel.limits import PUBLISH_RETRY_S, PUBLISH_WAIT_MAX_S

Part = TypeVar("Part")
Outcome = tuple[str, str, Manifest | None]


class Publisher:
    """Publishes the versions of one trainer. All methods are called by all ranks together."""

    def __init__(
        self, place: Place, log: WeightLog, optimizer: MasterOptimizer, committer: HeadCommitter, incidents: Incidents
    ) -> None:
        self._place = place
        self._log = log
        self._optimizer = optimizer
        self._policy = optimizer.policy
        self._ranks = optimizer.policy.ranks
        self._committer = committer
        self._incidents = incidents
        self._commit_ms = 0.0
        self.files: dict[str, bytes] = {}
        """Auxiliary files of every anchor."""
        self.head: tuple[str, Manifest] | None = None
        """Digest and manifest of the newest committed version."""
        self._base: list[Piece] = []

    def resume(self, digest: str, manifest: Manifest) -> None:
        """Go on from a committed version whose bits the policy holds now."""
        self.head = (digest, manifest)
        self._base = self._policy.pieces()

    def publish_first(self) -> Manifest:
        """Version 0: a complete copy, its training state, the commit.

        The snapshot goes first: a version 0 without one could not be trained on after a crash between the two.

        Raises:
            Fenced, Conflict; TimedOut when store or etcd stayed away too long.
        """
        layout, pieces = self._policy.layout, self._policy.pieces()
        parts = self._on_all(lambda: self._log.write_anchor(layout, pieces))
        states = self._on_all(lambda: self._log.write_snapshot(self._optimizer.arrays()))

        def write() -> tuple[str, Manifest]:
            digest, manifest = self._log.publish_anchor(layout, 0, parts, files=self.files)
            self._log.publish_snapshot(digest, manifest, states, self._meta())
            return digest, manifest

        digest, manifest = self._commit(write)
        self.resume(digest, manifest)
        return manifest

    def publish(self, record: StepRecord, metrics: Mapping[str, float]) -> Manifest:
        """The next version, made by this step, committed. Raises as `publish_first`."""
        assert self.head is not None, "a step follows a version"
        parent_digest, parent = self.head
        layout, new = self._policy.layout, self._policy.pieces()
        encoded: list[EncodedDelta] = []

        def encode() -> Any:
            encoded[:] = [self._log.write_delta(layout, self._base, new)]
            return encoded[0].part

        started = time.monotonic()
        parts = self._on_all(encode)
        payload = sum(info.nbytes for part in parts for info in part.chunks)
        measured = {
            **metrics,
            "sync/encode_ms": (time.monotonic() - started) * 1000,
            "sync/publish_ms": self._commit_ms,  # of the version before: this one's is known only after its manifest
            "sync/payload_bytes": float(payload),
            "sync/density": sum(part.changed for part in parts) / layout.elements,
        }
        started = time.monotonic()
        digest, manifest = self._commit(
            lambda: self._log.publish_delta(layout, parent, parent_digest, parts, record, metrics=measured)
        )
        self._commit_ms = (time.monotonic() - started) * 1000
        advance(self._base, encoded[0])
        self.head = (digest, manifest)
        return manifest

    def snapshot(self) -> bool:
        """Write the training state of the head; False if there was no room, which harms nothing but the replay's length."""
        assert self.head is not None
        digest, manifest = self.head
        return self._beside(
            "snapshot",
            lambda: self._log.write_snapshot(self._optimizer.arrays()),
            lambda parts: self._log.publish_snapshot(digest, manifest, parts, self._meta()),
        )

    def anchor_if_due(self) -> bool:
        """Write a complete copy beside the head when its chain outweighs one; whether one was written."""
        assert self.head is not None
        digest, manifest = self.head
        if not wants_anchor(manifest):
            return False
        layout = self._policy.layout
        return self._beside(
            "anchor",
            lambda: self._log.write_anchor(layout, self._base),
            lambda parts: self._log.publish_anchor(
                layout, manifest.version, parts, files=self.files, beside=(digest, manifest)
            ),
        )

    def retire(self) -> None:
        """Delete what no restore needs any more, after a snapshot. Harmless when it fails: the next one finds the rest."""
        assert self.head is not None
        if not self._ranks.first:
            return
        pinned = {0} if self._place.spec.algorithm.kl_coef > 0 else frozenset[int]()
        try:
            apply_retention(self._log.store, self._place.run_id, self.head[0], pinned=pinned)
        except WhimbrelError as error:
            self._incidents.report("retention", f"Old versions were not removed: {error}")

    def _meta(self) -> dict[str, Any]:
        return {"world_size": self._ranks.world_size, "seed": self._place.spec.seed, "worker_epoch": self._place.epoch}

    def _beside(self, what: str, write: Callable[[], Part], join: Callable[[list[Part]], Any]) -> bool:
        """Write something that a version does not depend on: no room is an incident, not a wait."""
        full, part = "", None
        try:
            part = write()
        except StorageFull as error:
            full = str(error)
        outcomes = self._ranks.gather((full, part))
        full = next((each for each, _ in outcomes if each), "")
        if self._ranks.first and not full:
            try:
                join([each for _, each in outcomes])
            except StorageFull as error:
                full = str(error)
        full = self._ranks.broadcast(full)
        if full:
            self._incidents.report("storage_full", f"The {what} was left out: {full}")
            self._take_back(what)
        return not full

    def _take_back(self, what: str) -> None:
        """Give the room back that the attempt took: the next versions need it."""
        try:
            self._log.discard()
        except WhimbrelError as error:
            self._incidents.report("retention", f"What was written of the {what} was not removed: {error}")

    def _on_all(self, write: Callable[[], Part]) -> list[Part]:
        """Run a local write on every rank until none has a full store; returns the parts in rank order."""
        patience = _Patience()
        while True:
            full, part = "", None
            try:
                part = write()
            except StorageFull as error:
                full = str(error)
            outcomes = self._ranks.gather((full, part))
            full = next((each for each, _ in outcomes if each), "")
            if not full:
                return [each for _, each in outcomes]
            self._wait(patience, "storage_full", full)

    def _commit(self, write: Callable[[], tuple[str, Manifest]]) -> tuple[str, Manifest]:
        outcome: Outcome = ("", "", None)
        if self._ranks.first:
            outcome = self._write_and_commit(write)
        verdict, text, manifest = self._ranks.broadcast(outcome)
        if verdict == "fenced":
            raise Fenced(text)
        if verdict == "conflict":
            raise Conflict(text)
        assert manifest is not None
        return text, manifest

    def _write_and_commit(self, write: Callable[[], tuple[str, Manifest]]) -> Outcome:
        try:
            # One manifest per version: a second one would have another digest, and an unknown outcome two meanings.
            digest, manifest = self._until_done(write)
            self._until_done(lambda: self._committer.commit(manifest.version, digest))
            self._until_done(lambda: self._log.mark_committed(digest, manifest))
        except Fenced as error:
            return "fenced", str(error), None
        except Conflict as error:
            return "conflict", str(error), None
        return "committed", digest, manifest

    def _until_done(self, action: Callable[[], Part]) -> Part:
        patience = _Patience()
        while True:
            try:
                return action()
            except StorageFull as error:
                self._wait(patience, "storage_full", str(error))
            except Unreachable as error:
                self._wait(patience, "", f"The commit waits for etcd: {error.message}")

    def _wait(self, patience: _Patience, kind: str, why: str) -> None:
        # The counter moves, so that a wait with a known reason is not taken for a hang.
        self._place.progress("waiting", note=why, counters={"publish_retries": 1.0})
        if kind and patience.first:
            self._incidents.report(kind, f"The step waits to be published: {why}")
        self._place.check()
        patience.wait(why)


class _Patience:
    """Growing waits with a deadline."""

    def __init__(self) -> None:
        self._tries = 0
        self._deadline = time.monotonic() + PUBLISH_WAIT_MAX_S

    @property
    def first(self) -> bool:
        return self._tries == 0

    def wait(self, why: str) -> None:
        if time.monotonic() > self._deadline:
            raise TimedOut(
                f"The step could not be published within {PUBLISH_WAIT_MAX_S:.0f} s: {why}",
                hint="The trainer starts again from the last committed version and makes the step anew.",
            )
        time.sleep(PUBLISH_RETRY_S[min(self._tries, len(PUBLISH_RETRY_S) - 1)])
        self._tries += 1
