"""Every fault of the local matrix, one after the other, on one run: each part killed, and paused for longer than its lease."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from api.cli.faults import FAULTS, Director
from tests.e2e.conftest import Stage, left_behind
from whimbrel.coordination import free_port

MINUTES = 60


@pytest.mark.faults
@pytest.mark.timeout(25 * MINUTES)
def test_each_part_killed_and_paused_in_turn_loses_nothing(stage: Callable[..., Stage]) -> None:
    here = stage(nodes=3)
    run_id = here.start(max_steps=100_000, roles={"rollout": {"count": 2, "max_groups": 4}})
    director = Director(here.cluster, here.client, run_id, print)
    verdicts = []
    for fault in FAULTS:
        (verdict,) = director.play([fault])
        verdicts.append(verdict)
        audit = here.client.audit(run_id)
        assert audit["balanced"], fault.name
        assert audit["trajectories_lost"] == audit["consumed_twice"] == 0, fault.name
    assert {verdict.fault.name: verdict.problem for verdict in verdicts if not verdict.survived} == {}
    status = here.client.run(run_id)["status"]
    assert status["state"] == "running"


@pytest.mark.faults
@pytest.mark.timeout(5 * MINUTES)
def test_what_a_killed_up_left_behind_is_ended_by_the_next_one(tmp_path: Path) -> None:
    home, ports = tmp_path / "home", ("--port", str(free_port()), "--etcd-port", str(free_port()), "--nodes", "1")
    environment = os.environ | {"WHIMBREL_HOME": str(home)}
    command = [sys.executable, "-m", "api.cli.main", "up", *ports]

    def serving() -> tuple[subprocess.Popen[str], list[str]]:
        process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        lines: list[str] = []
        while not any(line.startswith("next") for line in lines):
            lines.append(process.stderr.readline())
            assert lines[-1], lines
        return process, lines

    first, _ = serving()
    first.kill()
    first.communicate()
    assert left_behind(home), "etcd, controller and agent outlive it"
    second, said = serving()
    assert any("had left behind" in line for line in said)
    second.terminate()
    second.communicate(timeout=60)
    assert left_behind(home) == []
