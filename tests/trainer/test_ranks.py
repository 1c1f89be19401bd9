from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainer.stage import RUN, FakePlace, own_trainer, read_head, restore
from tests.trainer.support import make_spec
from whimbrel.coordination import BlockingEtcd, free_port, keys

DEADLINE_S = 100


def _start(endpoint: str, root: Path, model: str, epoch: int, die_at: int = -1) -> list[tuple[int, str]]:
    """Both ranks to their end: (exit code, output) of each."""
    port = str(free_port())
    command = [sys.executable, "-m", "tests.trainer.ranked", endpoint, str(root), model, str(epoch), str(die_at)]
    ranks = []
    for rank in range(2):
        env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
               "OMP_NUM_THREADS": "1"}  # fmt: skip
        ranks.append(
            subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1)
        )
    try:
        return [(rank.wait(DEADLINE_S), rank.stdout.read() if rank.stdout else "") for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def _end(outputs: list[tuple[int, str]]) -> list[str]:
    assert [code for code, _ in outputs] == [0, 0], outputs
    return next(line.split()[1:] for line in outputs[0][1].splitlines() if line.startswith("END"))


@pytest.mark.faults
@pytest.mark.timeout(300)
def test_two_ranks_come_back_from_a_death_with_the_bits_of_an_undisturbed_run(
    tmp_path: Path, etcd: BlockingEtcd, model: str
) -> None:
    endpoint = etcd.endpoints[0]
    died = _start(endpoint, tmp_path / "a", model, own_trainer(etcd), die_at=2)
    assert died[1][0] == -9
    assert died[0][0] not in (0, -9), "the other rank must notice and end"
    head = read_head(etcd)
    assert head is not None
    assert head.version == 2
    training, state, replayed, incidents = _end(_start(endpoint, tmp_path / "a", model, own_trainer(etcd)))
    assert (replayed, incidents) == ("2", "0")

    # One process reads what two have written, and finds every bit in place.
    place = FakePlace(tmp_path / "a", etcd, make_spec(model), own_trainer(etcd))
    alone = restore(place)
    assert [alone.stepper.optimizer.training_digest(), alone.stepper.policy.state_digest()] == [training, state]
    assert place.controller.incidents == []

    etcd.delete(keys.head(RUN))
    undisturbed = _end(_start(endpoint, tmp_path / "b", model, own_trainer(etcd)))
    assert undisturbed[:2] == [training, state]
