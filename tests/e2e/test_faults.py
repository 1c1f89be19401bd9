"""Every fault of the local matrix, one after the other, on one run (F1, F3 to F8 and F12 of the usual matrices)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from api.cli.faults import FAULTS, Director
from tests.e2e.conftest import Stage

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
