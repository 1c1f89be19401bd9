"""Weight sync of a real run: what each version weighs, and how long it takes from commit to applied."""

from __future__ import annotations

import statistics
import time
from argparse import Namespace
from typing import Any

from benchmarks.local_run import LocalRun, local_run, say

STEPS = 12
TIMEOUT_S = 1_800.0
TERMINAL = ("completed", "failed", "stopped")


def measure(options: Namespace) -> dict[str, Any]:
    with local_run(options.run_file, max_steps=options.max_steps or STEPS) as run:
        applied, pauses = _watch(run)
        versions = [version for version in run.client.versions(run.run_id) if version["version"] > 0]
    return {
        "run_file": options.run_file,
        "versions": [
            {
                "version": version["version"],
                "payload_bytes": version["payload_bytes"],
                "full_bytes": version["full_bytes"],
                "density": version["changed"] / version["total"],
                "bytes_per_change": version["payload_bytes"] / version["changed"] if version["changed"] else None,
            }
            for version in sorted(versions, key=lambda version: version["version"])
        ],
        "publish_to_applied_s": _median(applied),
        "generation_pause_s": _median(pauses),
    }


def _watch(run: LocalRun) -> tuple[list[float], list[float]]:
    """Follow the run to its end; collect what each rollout reports of each version that it applied."""
    seen: dict[tuple[str, int], tuple[float, float]] = {}
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        status = run.client.run(run.run_id)["status"]
        for worker in run.client.workers(run.run_id):
            gauges = worker["gauges"]
            if worker["role"] == "rollout" and worker["policy_version"] > 0 and "publish_to_applied_s" in gauges:
                key = (worker["worker"], worker["policy_version"])
                seen[key] = (gauges["publish_to_applied_s"], gauges["generation_pause_ms"] / 1000.0)
        if status["state"] in TERMINAL:
            say(f"run {status['state']} at version {status['head_version']}")
            break
        time.sleep(0.5)
    return [latency for latency, _ in seen.values()], [pause for _, pause in seen.values()]


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None
