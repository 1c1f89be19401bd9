"""The chain always restores, whatever order of steps, anchors, snapshots, deletions and take-overs a run has had."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checkpoint.log_world import RUN, Trainer, holds, reader_of, restored
from whimbrel.checkpoint import HostWeights, WeightLog, apply_retention, describe, store_reader, verify_chain
from whimbrel.clock import ManualClock
from whimbrel.errors import Fenced

operations = st.lists(
    st.sampled_from(["step", "step", "step", "anchor", "snapshot", "retain", "take over", "follow"]),
    min_size=5,
    max_size=30,
)


def lose_the_lease() -> None:
    raise Fenced("A newer epoch owns the trainer.")


class History:
    """A run, and a follower that tails it now and then."""

    def __init__(self) -> None:
        self.trainer = Trainer()
        self.trainer.start()
        self.follower = HostWeights(RUN)
        self.epoch = 1

    def apply(self, operation: str) -> None:
        trainer = self.trainer
        match operation:
            case "step":
                trainer.step()
            case "anchor" if len(trainer.links) > 1:
                trainer.anchor()
            case "snapshot":
                trainer.snapshot()
            case "retain":
                apply_retention(trainer.store, RUN, trainer.head)
            case "follow":
                reader_of(trainer.store).restore(self.follower, trainer.head)
                assert holds(self.follower, trainer.states[-1])
            case "take over":
                self._take_over()

    def _take_over(self) -> None:
        """The owner publishes once more without being allowed to commit; a new epoch goes on from the head."""
        trainer = self.trainer
        try:
            trainer.step(before_commit=lose_the_lease)
        except Fenced:
            self.epoch += 1
        trainer.log = WeightLog(trainer.store, RUN, self.epoch, ManualClock())
        trainer.base = restored(trainer.store, trainer.head).pieces()


@given(operations)
@settings(max_examples=30, deadline=None)
def test_law_1_and_2_the_committed_head_restores_after_any_history(steps: list[str]) -> None:
    history = History()
    for operation in steps:
        history.apply(operation)
        trainer = history.trainer
        assert holds(restored(trainer.store, trainer.head), trainer.states[-1])
        joiner = HostWeights(RUN)
        reader_of(trainer.store).restore(joiner, trainer.head)
        assert holds(joiner, trainer.states[-1]), "and without listing the store"
    described = describe(history.trainer.store, RUN)
    assert described.head == history.trainer.head
    committed = [digest for digest, _ in history.trainer.links]
    assert [digest for digest, _ in described.versions] == committed[-len(described.versions) :]
    assert verify_chain(history.trainer.store, RUN).payloads_missing == []
    reader = store_reader(history.trainer.store, RUN)
    newest = reader.newest_snapshot(history.trainer.store, described.head)
    assert bool(newest) == bool(described.snapshots)
    if newest:
        snapshot = reader.snapshot(newest)
        replay = reader.history(described.head, snapshot.manifest.version)
        assert [manifest.version for _, manifest in replay] == list(
            range(snapshot.manifest.version + 1, described.head_version + 1)
        )
        for _, manifest in replay:
            assert manifest.step is not None
            assert all(history.trainer.store.size(entry.payload) for entry in manifest.step.batch)
