"""A controller without a loop, so that the API's tests need no etcd, and rows to look at."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from orchestrator.db import tables
from whimbrel.clock import SystemClock
from whimbrel.wire.cluster import Leader

ADMIN = "wb_admin_test"
CLUSTER = "wb_cluster_test"
SPEC: dict[str, Any] = {
    "name": "sums",
    "model": "builtin:tiny",
    "batch_size": 8,
    "algorithm": {"group_size": 4},
    "max_steps": 5,
}


@dataclass
class StubSignals:
    addresses: dict[str, str] = field(default_factory=dict)

    def agent_address(self, node_id: str) -> str | None:
        return self.addresses.get(node_id)


class StubController:
    """Says what a test wants it to say."""

    def __init__(self) -> None:
        self.leading = True
        self.serving = True
        self.leader: Leader | None = Leader(holder="test:1", url="http://127.0.0.1:8600")
        self.etcd_reachable = True
        self.etcd_reason = ""
        self.epoch = 1
        self.wakes = 0
        self.signals = StubSignals()
        self._stopped = asyncio.Event()

    def wake(self) -> None:
        self.wakes += 1

    async def run(self) -> None:
        await self._stopped.wait()

    def stop(self) -> None:
        self._stopped.set()


def spec(name: str = "sums", **changes: Any) -> dict[str, Any]:
    return {**SPEC, "name": name, **changes}


def now() -> datetime:
    return SystemClock().wall()


def version_row(run_id: str, version: int, **changes: Any) -> tables.Version:
    values: dict[str, Any] = {
        "run_id": run_id,
        "version": version,
        "manifest": f"{version:032x}",
        "kind": "delta" if version else "anchor",
        "epoch": 1,
        "payload_bytes": 100,
        "full_bytes": 10_000,
        "changed": 10,
        "total": 1_000,
        "metrics": {"reward/mean": version / 10, "staleness/max": 1.0, "perf/tokens_per_s": 50.0},
        "committed_at": now() - timedelta(seconds=100 - version),
    }
    return tables.Version(**{**values, **changes})
