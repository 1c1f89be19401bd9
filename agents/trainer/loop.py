"""The trainer's loop: batch → step → publish → commit, until `max_steps`; and nothing between two units but `check()`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from agents.trainer.batches import BatchFetcher, FetchedBatch
from agents.trainer.optimizer import learning_rate
from agents.trainer.place import Incidents, Place
from agents.trainer.ranks import Ranks
from agents.trainer.restore import Trained, batch_of
from agents.trainer.step import StepOutcome, step_rng
from whimbrel.checkpoint import BatchEntry, Manifest, StepRecord
from whimbrel.errors import StorageFull, UsageError
from whimbrel.limits import BATCHES_AHEAD, HEAL_EVERY_S, NONFINITE_STEPS_MAX, RANKS_IDLE_S
from whimbrel.log import get_logger

log = get_logger("trainer")


class TrainerLoop:
    """Runs on every rank; rank 0 has the fetcher and tells the others what to do."""

    def __init__(
        self,
        place: Place,
        ranks: Ranks,
        trained: Trained,
        fetcher: BatchFetcher | None,
        incidents: Incidents,
        heal: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        """
        Args:
            heal: writes chunks again that the store damaged or lost, and returns their digests.
        """
        assert ranks.first == (fetcher is not None), "rank 0 alone speaks with the controller"
        self._place = place
        self._ranks = ranks
        self._stepper = trained.stepper
        self._publisher = trained.publisher
        self._schedule = trained.schedule
        self._cursor = trained.cursor
        self._fetcher = fetcher
        self._incidents = incidents
        self._nonfinite = 0
        self._heal = heal
        self._healed_at = time.monotonic()

    @property
    def version(self) -> int:
        """The newest committed version, which is the number of the step to come."""
        assert self._publisher.head is not None
        return self._publisher.head[1].version

    def run(self) -> None:
        """Train until `max_steps` versions are committed.

        Raises:
            Fenced, and what `place.check()` raises; UsageError: the numbers stay not finite; TimedOut, Conflict: see Publisher.
        """
        while self.version < self._place.spec.max_steps:
            waited_from = time.monotonic()
            fetched = self._next_batch()
            self._train(fetched, time.monotonic() - waited_from)
        self._place.progress("stopping", version=self.version, note="all steps are committed")

    def _next_batch(self) -> FetchedBatch:
        """The batch of the next step on every rank; rank 0 waits for it, the others for rank 0."""
        while True:
            fetched = self._ranks.broadcast(self._poll() if self._ranks.first else None)
            if fetched is not None:
                return fetched
            self._heal_while_waiting()

    def _heal_while_waiting(self) -> None:
        """No batch comes if no rollout can pass a version whose only copy rotted: look after the newest chunks."""
        if time.monotonic() - self._healed_at < HEAL_EVERY_S:
            return
        try:
            healed = self._heal()
        except StorageFull:
            healed = []  # it is told where a version waits for room; the next look comes soon
        if healed:
            self._incidents.report(
                "corrupt_chunk",
                f"{len(healed)} chunks of the newest versions were damaged or missing in the store; they are written again.",
                chunks=len(healed),
            )
            self._incidents.send()
        self._healed_at = time.monotonic()

    def _poll(self) -> FetchedBatch | None:
        """Rank 0: the batch if it comes soon. Raises what `check` and the fetcher raise."""
        assert self._fetcher is not None
        self._place.check()
        if self._place.paused:
            self._place.progress("waiting", version=self.version, note="The run is paused.")
            time.sleep(RANKS_IDLE_S / 4)
            return None
        fetched = self._fetcher.take(self.version, RANKS_IDLE_S)
        if fetched is None:
            self._place.progress("waiting", version=self.version, note=self._fetcher.reason)
            return None
        for ahead in range(1, BATCHES_AHEAD + 1):
            if self.version + ahead < self._place.spec.max_steps:
                self._fetcher.want(self.version + ahead)
        return fetched

    def _train(self, fetched: FetchedBatch, waited_s: float) -> None:
        step, started = fetched.step, time.monotonic()
        self._place.progress("working", version=step, note=f"step {step}")
        batch = batch_of(fetched, self._place.spec, self._stepper.policy.vocabulary)
        outcome = self._stepper.run(batch, step)
        self._judge(step, outcome)
        metrics = {**outcome.metrics, "time/wait_for_batch": waited_s}
        self._cursor = max([self._cursor, *(group.index + 1 for group in fetched.groups)])
        record = self._record(fetched, outcome, metrics)
        self._place.progress("publishing", note=f"publishing version {step + 1}")
        if self._ranks.first:
            self._place.check()
        manifest = self._publisher.publish(record, metrics)
        self._schedule.stepped(outcome.metrics["time/step"])
        self._report(manifest, batch.trained_tokens, time.monotonic() - started)
        self._keep_beside(manifest)
        self._incidents.send()

    def _judge(self, step: int, outcome: StepOutcome) -> None:
        """A step whose numbers are not finite is committed without a change of the weights, a few times in a row at most."""
        self._nonfinite = 0 if outcome.applied else self._nonfinite + 1
        if outcome.applied:
            return
        self._incidents.report(
            "numbers",
            f"Loss or gradient of step {step} is not finite; its batch is used up and the weights stay as they are.",
            step=step,
            in_a_row=self._nonfinite,
        )
        if self._nonfinite >= NONFINITE_STEPS_MAX:
            raise UsageError(
                f"Loss or gradient was not finite in {self._nonfinite} steps in a row, the last one being step {step}.",
                hint="Lower optimizer.lr, or look at the rewards of these steps.",
            )

    def _record(self, fetched: FetchedBatch, outcome: StepOutcome, metrics: dict[str, float]) -> StepRecord:
        spec = self._place.spec
        hyperparameters: dict[str, Any] = {
            "algorithm": spec.algorithm.model_dump(mode="json"),
            "optimizer": spec.optimizer.model_dump(mode="json"),
            "temperature": spec.sampling.temperature,
            "max_staleness": spec.staleness.max_versions,
            "lr": learning_rate(spec.optimizer, fetched.step),
            "applied": outcome.applied,
        }
        return StepRecord(
            step=fetched.step,
            batch=[BatchEntry(group.group_id, group.payload) for group in fetched.groups],
            hyperparameters=hyperparameters,
            rng=step_rng(spec.seed, fetched.step),
            cursor=self._cursor,
            training_digest=self._stepper.optimizer.training_digest(),
            world_size=self._ranks.world_size,
            metrics=metrics,
        )

    def _report(self, manifest: Manifest, tokens: int, seconds: float) -> None:
        if self._ranks.first:
            reward = manifest.metrics.get("reward/mean")
            log.info(
                f"version {manifest.version} of {self._place.spec.max_steps} committed",
                reward=None if reward is None else round(reward, 3),
                tokens=tokens,
                seconds=round(seconds, 2),
                payload_bytes=manifest.payload_bytes,
            )
        self._place.progress(
            "publishing",
            version=manifest.version,
            note=f"committed version {manifest.version}",
            counters={
                "steps_done": 1.0,
                "tokens_trained": float(tokens),
                "payload_bytes_published": float(manifest.payload_bytes),
            },
            gauges={"step_s": seconds, **{key: float(value) for key, value in manifest.metrics.items()}},
        )

    def _keep_beside(self, manifest: Manifest) -> None:
        """Snapshot and anchor when they are due, and retention behind them; rank 0's clock decides for all."""
        if self._ranks.broadcast(self._schedule.due):
            self._place.progress("publishing", note=f"writing a snapshot of version {manifest.version}")
            started = time.monotonic()
            if self._publisher.snapshot():
                self._schedule.written(time.monotonic() - started)
                self._publisher.retire()
        self._publisher.anchor_if_due()
