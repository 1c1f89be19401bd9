"""The main job on real processes: a run that loses its trainer on the way and ends as if nothing had happened."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from api.cli.faults import Director, Fault
from tests.e2e.conftest import Stage
from whimbrel.checkpoint import DirectoryStore, verify_chain

END_TIMEOUT_S = 150.0

STEPS = 24
"""Enough that the run is still under way when its trainer is back."""


def wait_end(stage: Stage, run_id: str) -> dict[str, Any]:
    """Wait until the run has ended; returns it."""
    deadline = time.monotonic() + END_TIMEOUT_S
    while time.monotonic() < deadline:
        run = stage.client.run(run_id)
        if run["status"]["state"] in ("completed", "failed", "stopped"):
            return run
        time.sleep(0.3)
    raise AssertionError(f"the run did not end: {stage.client.run(run_id)['status']}")


def test_a_run_completes_with_every_trajectory_used_once_although_its_trainer_is_killed(
    stage: Callable[..., Stage],
) -> None:
    here = stage(nodes=2)
    run_id = here.start(max_steps=STEPS)
    director = Director(here.cluster, here.client, run_id, print)
    (verdict,) = director.play([Fault("kill trainer", "trainer", "kill")])
    assert verdict.survived, verdict
    assert verdict.state_digest_equal, "the restored trainer reproduced the log's bits"
    run = wait_end(here, run_id)
    assert run["status"]["state"] == "completed", run["status"]
    audit = here.client.audit(run_id)
    assert audit["balanced"]
    assert audit["trajectories_lost"] == audit["consumed_twice"] == 0
    assert audit["consumed"] == STEPS * 4, "law 3: each step consumed its own groups"
    versions = sorted(version["version"] for version in here.client.versions(run_id))
    assert versions == list(range(STEPS + 1)), "every version was committed once"
    report = verify_chain(DirectoryStore(here.cluster.home / "store"), run_id, STEPS)
    assert report
    lines = here.client.logs(run_id, "trainer")["text"]
    assert "Traceback" not in lines
