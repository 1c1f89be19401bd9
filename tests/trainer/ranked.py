"""One rank of a two-rank trainer in a process of its own: `python -m tests.trainer.ranked ETCD ROOT MODEL EPOCH DIE_AT`.

Rank 1 kills itself in the middle of step DIE_AT (-1: never). Rank 0 says the digests at the end.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from agents.trainer.batch import Batch
from agents.trainer.ranks import Ranks
from agents.trainer.step import Stepper, make_deterministic
from tests.trainer.stage import FakePlace, train
from tests.trainer.support import make_spec
from whimbrel.coordination import BlockingEtcd


def main() -> None:
    endpoint, root, model, epoch, die_at = sys.argv[1:]
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    make_deterministic()
    spec = make_spec(model, max_steps=3, checkpoint={"snapshot_every": 3})
    place = FakePlace(Path(root), BlockingEtcd([endpoint]), spec, int(epoch), rank=rank, world_size=world_size)
    run = Stepper.run

    def dying(self: Stepper, batch: Batch, step: int) -> Any:
        if rank == 1 and step == int(die_at):
            os.kill(os.getpid(), signal.SIGKILL)
        return run(self, batch, step)

    Stepper.run = dying  # type: ignore[method-assign]
    ranks = Ranks.start(rank, world_size, place.epoch)
    trained = train(place, ranks)
    ends = (trained.stepper.optimizer.training_digest(), trained.stepper.policy.state_digest(), trained.replayed)
    if ranks.first:
        sys.stdout.write(" ".join(map(str, ("END", *ends, len(place.controller.incidents)))) + "\n")
        sys.stdout.flush()
    ranks.close()
    os._exit(0)


if __name__ == "__main__":
    main()
