"""Where a trainer starts: at version 0, or at the committed head, by the newest snapshot and a replay of the steps since.

Reads only what the head leads to. Each replayed version is checked against the log, policy and training state; where they
differ (other hardware, another number of ranks) the log is right: its weights are taken over and an incident says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from agents.trainer.batch import Batch, make_batch
from agents.trainer.batches import FetchedBatch
from agents.trainer.model_files import auxiliary_files, empty_model, load_model
from agents.trainer.optimizer import MasterOptimizer
from agents.trainer.place import ChunkSources, Incidents, Place
from agents.trainer.policy import Policy
from agents.trainer.publish import Publisher
from agents.trainer.ranks import Ranks
from agents.trainer.snapshots import SnapshotSchedule
from agents.trainer.step import Stepper
from whimbrel.checkpoint import (
    HostWeights,
    LogReader,
    Manifest,
    StepRecord,
    WeightLog,
    committed_digest,
    committed_head,
)
from whimbrel.commit import HeadCommitter
from whimbrel.errors import ChainGap, Corrupt, DigestMismatch, MissingChunk, NotFound, Unreachable, UsageError
from whimbrel.limits import PUBLISH_RETRY_S, PUBLISH_WAIT_MAX_S
from whimbrel.spec import RunSpec
from whimbrel.wire.cluster import Head
from whimbrel.wire.work import BatchGroup

Link = tuple[str, Manifest]
ModelFolder = Callable[[str, Path, Callable[[str], None]], Path]
"""`spec.model`, Whimbrel's home and who is told about progress → a Hugging Face folder."""


@dataclass
class Trained:
    """A trainer that stands at the committed head."""

    stepper: Stepper
    publisher: Publisher
    schedule: SnapshotSchedule
    cursor: int
    """Prompt indices below this are behind the training."""
    replayed: int = 0


class Restorer:
    """Brings all ranks to the head. Used once per process, by all ranks together."""

    def __init__(
        self,
        place: Place,
        ranks: Ranks,
        chunks: ChunkSources,
        incidents: Incidents,
        model_folder: ModelFolder,
        device: torch.device | None = None,
    ) -> None:
        self._place = place
        self._ranks = ranks
        self._chunks = chunks
        self._incidents = incidents
        self._model_folder = model_folder
        self._device = device or torch.device("cpu")
        self._reader = LogReader(chunks.fetch, place.run_id)
        self._log = WeightLog(chunks.store, place.run_id, place.epoch)
        self._committer = HeadCommitter(place.etcd, place.run_id, place.worker, place.epoch)
        self._host = HostWeights(place.run_id)

    def run(self) -> Trained:
        """Build version 0, or restore the head.

        Raises:
            Fenced; UsageError: the model cannot be trained, or etcd lost the run's head.
            ChainGap, MissingChunk, Corrupt: the log's weights cannot be read.
        """
        self._place.progress("restoring", note="reading the head")
        head = self._ranks.broadcast(self._read_head() if self._ranks.first else None)
        return self._first() if head is None else self._restore(head)

    def _read_head(self) -> Head | None:
        deadline = time.monotonic() + PUBLISH_WAIT_MAX_S
        while True:
            try:
                head = self._committer.read()
                if head is None:
                    self._require_new_log()
                return head
            except Unreachable as error:
                if time.monotonic() > deadline:
                    raise
                self._place.progress("waiting", note=f"The restore waits for etcd: {error.message}")
                self._place.check()
                time.sleep(PUBLISH_RETRY_S[-1] / 5)

    def _require_new_log(self) -> None:
        """A run without a head begins at version 0, but never over versions that were committed.

        Raises:
            UsageError: the store has such versions.
        """
        try:
            last, _ = committed_head(self._chunks.store, self._place.run_id)
        except NotFound:
            return
        raise UsageError(
            f"etcd has no head of {self._place.run_id}, but its versions up to {last} are committed in the store. "
            "Nothing is trained over them.",
            hint="etcd has lost its data: bring it back, or start a new run.",
        )

    # -- version 0 -----------------------------------------------------------------------------------------------------

    def _first(self) -> Trained:
        spec = self._place.spec
        self._place.progress("restoring", note=f"making version 0 from {spec.model}")
        folder = self._ranks.broadcast(
            self._model_folder(spec.model, self._place.home, self._tell) if self._ranks.first else None
        )
        policy = Policy(load_model(folder), self._ranks, self._device)
        optimizer = MasterOptimizer(policy, spec.optimizer)
        publisher = Publisher(self._place, self._log, optimizer, self._committer, self._incidents)
        publisher.files = auxiliary_files(folder)
        started = time.monotonic()
        self._place.progress("publishing", note="writing version 0")
        manifest = publisher.publish_first()
        schedule = SnapshotSchedule(spec.checkpoint.snapshot_every)
        schedule.written(time.monotonic() - started)
        self._place.progress("publishing", version=manifest.version)
        reference = Policy(load_model(folder), self._ranks, self._device) if spec.algorithm.kl_coef > 0 else None
        return Trained(Stepper(optimizer, spec, reference, self._place.tick), publisher, schedule, cursor=0)

    def _tell(self, line: str) -> None:
        # The counter shows that it moves: large models take their time.
        self._place.progress("restoring", note=line, counters={"restore_steps": 1.0})

    # -- a later version -----------------------------------------------------------------------------------------------

    def _restore(self, head: Head) -> Trained:
        spec, started = self._place.spec, time.monotonic()
        manifest = self._reader.manifest(head.manifest)
        _, anchor = self._reader.anchor_of(head.manifest)
        files = self._reader.files(anchor)
        policy = Policy(empty_model(files), self._ranks, self._device)
        optimizer = MasterOptimizer(policy, spec.optimizer)
        stepper = Stepper(optimizer, spec, self._reference(files), self._place.tick)
        schedule = SnapshotSchedule(spec.checkpoint.snapshot_every)
        at = self._load_snapshot(optimizer, head)
        if at is None:
            self._adopt(policy, (head.manifest, manifest), forget=True)
            optimizer.reset_moments()
            at = manifest.version
        links = self._reader.history(head.manifest, at)
        for count, link in enumerate(links, start=1):
            self._place.check()
            self._tell(f"replay {count}/{len(links)}")
            step_started = time.monotonic()
            self._replay(stepper, link)
            schedule.stepped(time.monotonic() - step_started)
        self._require_state(policy, manifest)
        publisher = Publisher(self._place, self._log, optimizer, self._committer, self._incidents)
        publisher.files = files
        publisher.resume(head.manifest, manifest)
        if self._ranks.first:
            self._log.mark_committed(head.manifest, manifest)
        self._place.progress(
            "restoring",
            version=manifest.version,
            note=f"restored version {manifest.version}: snapshot {at}, {len(links)} steps replayed",
            gauges={
                "replayed_steps": float(len(links)),
                "snapshot_version": float(at),
                "restore_s": time.monotonic() - started,
            },
        )
        cursor = manifest.step.cursor if manifest.step else 0
        return Trained(stepper, publisher, schedule, cursor, len(links))

    def _load_snapshot(self, optimizer: MasterOptimizer, head: Head) -> int | None:
        """Load the newest snapshot that every rank can verify; its version, or None if there is none."""
        candidates = self._ranks.broadcast(list(self._snapshots(head.manifest)) if self._ranks.first else None)
        for digest in candidates:
            fault, version = "", -1
            try:
                snapshot = self._reader.snapshot(digest)
                optimizer.load(snapshot.arrays)
                version = snapshot.manifest.version
            except (MissingChunk, Corrupt) as error:
                fault = str(error)
            faults = [each for each in self._ranks.gather(fault) if each]
            if not faults:
                return version
            self._incidents.report("corrupt_chunk", f"Snapshot {digest} is passed over: {faults[0]}", snapshot=digest)
        self._incidents.report(
            "snapshot_lost",
            f"No snapshot of the training state can be read; version {head.version} goes on from its bf16 weights "
            "with empty optimizer moments.",
            version=head.version,
        )
        return None

    def _snapshots(self, head: str) -> Iterator[str]:
        """Digests of the chain's snapshots, newest first, as far back as manifests are held."""
        seen: set[str] = {""}
        try:
            newest = self._reader.newest_snapshot(self._chunks.store, head)
        except (MissingChunk, Corrupt, ChainGap):
            newest = ""
        if newest not in seen:
            seen.add(newest)
            yield newest
        at = head
        while at:
            try:
                manifest = self._reader.manifest(at)
                # Version 0's own snapshot was written before any manifest could name it.
                older = manifest.snapshot or self._reader.newest_snapshot(self._chunks.store, at)
                at = manifest.parent
            except (MissingChunk, Corrupt, ChainGap):
                return
            if older not in seen:
                seen.add(older)
                yield older

    def _replay(self, stepper: Stepper, link: Link) -> None:
        """One recorded step, checked; the log's weights where it does not come out the same."""
        manifest = link[1]
        record = manifest.step
        assert record is not None, "every version after 0 is made by a step"
        applied = bool(record.hyperparameters.get("applied", True))
        fault = ""
        if applied:
            fault = self._run_step(stepper, record)
        if not fault:
            fault = self._differs(stepper, manifest, record)
        if fault:
            self._incidents.report(
                "replay_mismatch",
                f"Replaying step {record.step} did not give version {manifest.version} again ({fault}); "
                "the log's weights are taken over.",
                version=manifest.version,
                recorded_ranks=record.world_size,
                ranks=self._ranks.world_size,
            )
            self._adopt(stepper.policy, link)

    def _run_step(self, stepper: Stepper, record: StepRecord) -> str:
        """Empty, or why the step could not be run."""
        answer: tuple[str, FetchedBatch | None] = ("", None)
        if self._ranks.first:
            try:
                found = self._chunks.fetch([entry.payload for entry in record.batch])
                groups = [
                    BatchGroup(group_id=entry.group_id, index=0, payload=entry.payload, payload_bytes=0,
                               min_version=0, max_version=0)
                    for entry in record.batch
                ]  # fmt: skip
                payloads = [found[entry.payload] for entry in record.batch]
                answer = ("", FetchedBatch(record.step, tuple(groups), tuple(payloads)))
            except (MissingChunk, Corrupt, Unreachable) as error:
                answer = (error.message, None)
        fault, fetched = self._ranks.broadcast(answer)
        if fetched is None:
            return fault
        try:
            batch = batch_of(fetched, self._place.spec, stepper.policy.vocabulary)
        except Corrupt as error:
            return error.message
        return "" if stepper.run(batch, record.step).applied else "the numbers were not finite this time"

    def _differs(self, stepper: Stepper, manifest: Manifest, record: StepRecord) -> str:
        state, training = stepper.policy.state_digest(), stepper.optimizer.training_digest()
        if state != manifest.state_digest:
            return f"policy {state} instead of {manifest.state_digest}"
        if record.training_digest and training != record.training_digest:
            return f"training state {training} instead of {record.training_digest}"
        return ""

    def _adopt(self, policy: Policy, link: Link, *, forget: bool = False) -> None:
        """Make the policy hold the log's bits of a version. `forget` drops the masters' finer digits as well."""
        self._reader.restore(self._host, link[0])
        if forget:
            with torch.no_grad():
                for shard in policy.shards:
                    shard.master.zero_()
        policy.adopt(self._host.tensors)
        self._require_state(policy, link[1])

    def _require_state(self, policy: Policy, manifest: Manifest) -> None:
        found = policy.state_digest()
        if found != manifest.state_digest:
            raise DigestMismatch(
                f"The restored policy has digest {found}; version {manifest.version} has {manifest.state_digest}."
            )

    def _reference(self, files: dict[str, bytes]) -> Policy | None:
        """Version 0 for the KL penalty, from the log."""
        if self._place.spec.algorithm.kl_coef <= 0:
            return None
        first = committed_digest(self._chunks.store, self._place.run_id, 0)
        manifest = self._reader.manifest(first)
        host = HostWeights(self._place.run_id)
        host.load_anchor(first, manifest, self._chunks.fetch)
        policy = Policy(empty_model(files), self._ranks, self._device)
        policy.adopt(host.tensors)
        return policy


def batch_of(fetched: FetchedBatch, spec: RunSpec, vocabulary: int) -> Batch:
    """The rows of a fetched batch under the run's rules. Raises Corrupt."""
    return make_batch(
        fetched.decode(),
        fetched.step,
        max_staleness=spec.staleness.max_versions,
        normalize=spec.algorithm.normalize_advantage,
        vocabulary=vocabulary,
    )
