"""`python -m tests.core.simulate --seed N [--events E]`: the pure core against a toy cluster under seeded faults.

One seed is one history: random faults at random moments in virtual time, then quiet. Checked at every tick: without etcd
nothing is placed or declared dead, and no part is given out twice in one plan; at the end every run is healthy, or it
failed because its restart budget was spent. Prints the seed and the command that repeats it when a check fails.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter

from orchestrator.core.decisions import MarkNode, StartWorker, StopWorker
from tests.core.cluster import TICK_S, Cluster
from tests.core.faults import FAULT_NAMES, inject
from whimbrel.limits import RESTART_BUDGET

QUIET_S = 150.0
"""After the last fault, every run must be healthy within this."""


def simulate(seed: int, events: int) -> str:
    """Play one history; returns "" when every check held, else what did not."""
    chance = random.Random(seed)
    cluster = Cluster(3, chance.choice((1, 2)))
    cluster.run_for(6)
    for _ in range(events):
        if chance.random() < 0.08:
            inject(cluster, chance.choice(FAULT_NAMES), chance.randrange(3))
        before = cluster.store.reachable
        plan = cluster.tick(cut=chance.randrange(5) if chance.random() < 0.1 else None)
        if not before and any(isinstance(one, StartWorker | StopWorker | MarkNode) for one in plan.decisions):
            return "something was placed or judged while etcd was away"
        started = Counter((one.run_id, one.worker) for one in plan.decisions if isinstance(one, StartWorker))
        if any(count > 1 for count in started.values()):
            return "a part was given to two nodes in one plan"
    return _settle(cluster)


def _settle(cluster: Cluster) -> str:
    cluster.return_etcd()
    for node_id in cluster.machines:
        cluster.start_agent(node_id)
    for run_id in cluster.jobs:
        for name in ("trainer", "rollout-0", "rollout-1"):
            cluster.pause_worker(run_id, name, paused=False)
    for _ in range(int(QUIET_S / TICK_S)):
        cluster.tick()
        if cluster.healthy():
            return ""
    for job in cluster.jobs.values():
        charged = Counter(who for who, past in job.failures if past.charged)
        spent = max(charged.values(), default=0) > RESTART_BUDGET
        if job.state != "running" and not (job.state == "failed" and spent):
            return f"{job.run_id} is {job.state} after {QUIET_S:.0f} quiet seconds: {job.reason}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.core.simulate", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds to play")
    parser.add_argument("--events", type=int, default=400, help="ticks of half a second under faults")
    options = parser.parse_args()
    for seed in range(options.seed, options.seed + options.seeds):
        problem = simulate(seed, options.events)
        if problem:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
