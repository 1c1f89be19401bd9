"""The faults that properties and simulation do to the toy cluster."""

from __future__ import annotations

from typing import Final

from tests.core.cluster import Cluster

FAULT_NAMES: Final = (
    "kill_worker",
    "pause_worker",
    "kill_node",
    "pause_agent",
    "kill_agent",
    "return_node",
    "lose_etcd",
    "return_etcd",
)


def inject(cluster: Cluster, fault: str, which: int) -> None:
    """Do a fault to the part number `which` of three."""
    worker = ["trainer", "rollout-0", "rollout-1"][which]
    match fault:
        case "kill_worker":
            cluster.kill_worker("run_0", worker, 1)
        case "pause_worker":
            cluster.pause_worker("run_0", worker)
        case "kill_node":
            cluster.kill_node(f"n{which}")
        case "pause_agent":
            cluster.machines[f"n{which}"].agent = "paused"
        case "kill_agent":
            cluster.machines[f"n{which}"].agent = "dead"
        case "return_node":
            cluster.start_agent(f"n{which}")
        case "lose_etcd":
            cluster.lose_etcd()
        case "return_etcd":
            cluster.return_etcd()
