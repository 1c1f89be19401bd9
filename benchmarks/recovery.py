"""Every fault of the local matrix, done to a real run: how soon it is seen and over, and what it costs.

`lost_trajectories` and `double_consumed` come from the ledger's audit after the last fault, by the fault during which
they arose if any did; `state_digest_equal` says whether a restored trainer reproduced the log's bits.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from api.cli.drill import choose_faults
from api.cli.faults import Director, Verdict
from benchmarks.local_run import local_run, say

STEPS = 100_000
"""More than the faults need: the run is stopped after the last one."""


def measure(options: Namespace) -> dict[str, Any]:
    with local_run(options.run_file, max_steps=options.max_steps or STEPS) as run:
        director = Director(run.cluster, run.client, run.run_id, say)
        entries = []
        before = run.client.audit(run.run_id)
        for fault in choose_faults(options.faults):
            (verdict,) = director.play([fault])
            after = run.client.audit(run.run_id)
            entries.append(entry(verdict, before, after))
            before = after
        status = run.client.run(run.run_id)["status"]
    return {"faults": entries, "ettr": status["ettr"]}


def entry(verdict: Verdict, before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """One row of the result."""
    return {
        "fault": verdict.fault.name,
        "detect_s": verdict.detect_s,
        "recover_s": verdict.recover_s,
        "lost_steps": verdict.lost_steps,
        "lost_trajectories": after["trajectories_lost"] - before["trajectories_lost"],
        "double_consumed": after["consumed_twice"] - before["consumed_twice"],
        "replayed_steps": verdict.replayed_steps,
        "state_digest_equal": verdict.state_digest_equal,
        "survived": verdict.survived,
        "problem": verdict.problem,
    }
