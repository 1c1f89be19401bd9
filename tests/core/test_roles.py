"""Law 5 in the core: what fails is replaced alone, and what only watches or records never costs a worker its place."""

from __future__ import annotations

import pytest

from orchestrator.core.decisions import MarkNode, StartWorker, StopWorker
from tests.core.cluster import Cluster
from tests.core.test_decide import applied, running
from whimbrel.limits import STORE_HOLD_S

PARTS = ("trainer", "rollout-0", "rollout-1")


def epochs(cluster: Cluster) -> dict[str, int]:
    return {name: owner.epoch for name, owner in cluster.jobs["run_0"].owners.items()}


@pytest.mark.parametrize("failed", [("trainer",), ("rollout-0",), ("rollout-0", "rollout-1")], ids=" ".join)
def test_law_5_who_did_not_fail_keeps_its_place(failed: tuple[str, ...]) -> None:
    cluster = running()
    before = epochs(cluster)
    for name in failed:
        cluster.kill_worker("run_0", name, 1, "boom")
    cluster.run_for(20)
    assert sorted(one.worker for one in applied(cluster, StartWorker)) == sorted(failed)
    assert not applied(cluster, StopWorker)
    for name in set(PARTS) - set(failed):
        assert epochs(cluster)[name] == before[name]
    assert cluster.healthy()


def test_law_5_without_etcd_not_even_a_worker_that_ended_is_judged() -> None:
    cluster = running()
    before = epochs(cluster)
    cluster.lose_etcd()
    cluster.run_for(3)
    cluster.kill_worker("run_0", "rollout-0", 1, "boom")
    cluster.run_for(30)
    assert not applied(cluster, StartWorker)
    assert not applied(cluster, MarkNode)
    cluster.return_etcd()
    cluster.run_for(STORE_HOLD_S + 20)
    assert [one.worker for one in applied(cluster, StartWorker)] == ["rollout-0"]
    assert epochs(cluster)["trainer"] == before["trainer"]
    assert cluster.healthy()
