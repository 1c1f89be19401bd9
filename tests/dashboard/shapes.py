"""Resources of the made-up cluster that stand still, in the shapes that the REST API answers."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from whimbrel.clock import rfc3339
from whimbrel.spec import RunSpec

Json = dict[str, Any]

RUN = "run_01m8qxd30je90rpvjvpcrsmaba"
SPEC: Json = RunSpec.model_validate(
    {"name": "sums", "model": "HuggingFaceTB/SmolLM2-135M-Instruct", "batch_size": 128, "max_steps": 80}
).model_dump(mode="json")


def make_run(began: datetime, ref: str, name: str, state: str, reason: str, **status: Any) -> Json:
    """A run; `status` overrides what a healthy one says."""
    return {
        "id": ref,
        "name": name,
        "desired": "running",
        "generation": 1,
        "observed_generation": 1,
        "conditions": [],
        "spec": {**SPEC, "name": name},
        "created_at": rfc3339(began),
        "started_at": rfc3339(began),
        "finished_at": None,
        "updated_at": rfc3339(began),
        "status": {
            "state": state,
            "reason": reason or "All three workers run; version 60 is committed.",
            "head_version": 60,
            "max_steps": 80,
            "reward": None,
            "tokens_per_s": 2214.0,
            "staleness_mean": 1.2,
            "staleness_max": 3.0,
            "ettr": 0.951,
            "recoveries": 2,
            "eta_seconds": 162.0,
            "workers_running": 3,
            "workers_total": 3,
            "open_incidents": 0,
            **status,
        },
    }


def other_runs(began: datetime, now: datetime) -> list[Json]:
    """Runs in other states, so that each look is there."""
    ended = rfc3339(now - timedelta(minutes=48))
    others = [
        make_run(
            began,
            "run_b",
            "sums-lr-sweep-3",
            "recovering",
            "The trainer restores version 31: replaying step 4 of 6.",
            head_version=31,
            reward=0.61,
            open_incidents=1,
            recoveries=1,
            ettr=0.884,
        ),
        make_run(
            began,
            "run_c",
            "countdown",
            "paused",
            "Paused as asked.",
            head_version=12,
            reward=0.34,
            tokens_per_s=None,
            ettr=1.0,
            recoveries=0,
        ),
        make_run(
            began,
            "run_d",
            "quickstart",
            "completed",
            "All 80 steps are committed.",
            head_version=80,
            reward=0.858,
            tokens_per_s=450,
            ettr=0.98,
            recoveries=0,
        ),
        make_run(
            began,
            "run_e",
            "chain-sum-long",
            "failed",
            "The environment raised ValueError: max_terms is too small.",
            head_version=-1,
            reward=None,
            tokens_per_s=None,
            staleness_mean=None,
            staleness_max=None,
            ettr=None,
            recoveries=0,
        ),
    ]
    for run in others[2:]:
        run["finished_at"] = ended
    return others


def make_node(index: int, began: datetime, now: datetime) -> Json:
    """node-3 is away."""
    away = index == 3
    return {
        "id": f"node-{index}",
        "state": "unreachable" if away else "ready",
        "address": f"10.4.0.{10 + index}:7400",
        "region": "local",
        "reason": "Its lease is gone and its agent is silent; asking it directly."
        if away
        else "Its agent is registered.",
        "schedulable": not away,
        "draining": False,
        "lease_age_s": 94.0 if away else 0.8,
        "last_seen_at": rfc3339(now),
        "cpus": 16,
        "memory_bytes": 67_400_000_000,
        "gpus": 0 if index == 2 else 1,
        "slots": 4,
        "slots_used": [0, 1, 2, 0][index],
        "cpu_ratio": None if away else 0.2 + 0.3 * index,
        "memory_available_bytes": 41_200_000_000,
        "disk_available_bytes": 802_000_000_000,
        "load_1m": 3.1,
        "workers": [[], [f"{RUN}/trainer"], [f"{RUN}/rollout-0", f"{RUN}/rollout-1"], []][index],
        "started_at": rfc3339(began),
    }


AUDIT: Json = {
    "run_id": RUN,
    "issued": 1056,
    "consumed": 960,
    "batched": 16,
    "buffered": 22,
    "leased": 38,
    "pooled": 18,
    "dropped": 2,
    "balance": 0,
    "balanced": True,
    "dropped_reasons": {"too long": 2},
    "trajectories": 7984,
    "trajectories_lost": 0,
    "consumed_twice": 0,
    "too_stale": 0,
    "max_staleness": 4,
    "late_results": 3,
    "from_log": 0,
    "sound": True,
    "head_version": 60,
}

LOG = "\n".join(
    f"2026-12-01T04:{21 + step // 7:02d}:{step * 8 % 60:02d}Z info step committed version={step} reward={0.3 + step / 100:.3f}"
    for step in range(60)
)
