"""Copy the fleet's and the workers' latest signs into the database, about once a second, for API and dashboard.

Nothing is decided from these rows, so a lost copy costs a gap in the picture and no more.
"""

from __future__ import annotations

import datetime as dt
from typing import Any

import msgspec

from orchestrator.control.observe import Registry
from orchestrator.control.records import Known
from orchestrator.control.signals import Part, ProgressSigns, Signals
from orchestrator.core.health import worker_health
from orchestrator.core.world import Run, Worker, World
from orchestrator.db import FleetRepository, RunRepository, VersionRepository
from whimbrel.clock import Clock
from whimbrel.limits import PROGRESS_EVERY_S


class Panel:
    """The database's picture of the fleet."""

    def __init__(
        self, fleet: FleetRepository, runs: RunRepository, versions: VersionRepository, signals: Signals, clock: Clock
    ) -> None:
        self._fleet = fleet
        self._runs = runs
        self._versions = versions
        self._signals = signals
        self._clock = clock
        self._flushed_s: float | None = None
        self._shown: dict[Part, dict[str, Any]] = {}
        self._nodes: dict[str, dict[str, Any]] = {}
        self._applied: dict[Part, int] = {}

    def begin_term(self) -> None:
        """Show everything anew: another controller may have written since."""
        self._flushed_s = None
        self._shown.clear()
        self._nodes.clear()

    async def flush(self, epoch: int, world: World, known: Known, registry: Registry) -> bool:
        """Write what changed, at most once per PROGRESS_EVERY_S; whether it was time. Raises Fenced or Unreachable."""
        elapsed_s = 0.0 if self._flushed_s is None else world.now_s - self._flushed_s
        if self._flushed_s is not None and elapsed_s < PROGRESS_EVERY_S * 0.9:
            return False
        self._flushed_s = world.now_s
        await self._flush_nodes(epoch, known, registry)
        await self._flush_workers(epoch, world)
        await self._flush_applies(epoch)
        await self._flush_time(epoch, world, elapsed_s)
        return True

    # -- nodes ------------------------------------------------------------------------------------------------------

    async def _flush_nodes(self, epoch: int, known: Known, registry: Registry) -> None:
        now = self._clock.wall()
        rows = {row.node_id for row in known.nodes}
        for node_id, record in registry.nodes.items():
            columns: dict[str, Any] = {
                "incarnation": record.incarnation,
                "address": record.address,
                "region": record.region,
                "resources": msgspec.to_builtins(record.resources),
                "started_at": record.started_at,
            }
            if node_id not in rows and node_id not in self._nodes:
                columns |= {"joined_at": now, "state": "ready", "reason": "Its agent is registered."}
            signs = self._signals.agents.get(node_id)
            if signs is not None:
                report = signs.report
                names = ("cpu_ratio", "memory_available_bytes", "disk_available_bytes", "load_1m")
                columns["usage"] = {name: getattr(report, name) for name in names}
                columns["last_report_at"] = now - dt.timedelta(seconds=self._age(signs.received_at_s))
            if columns != self._nodes.get(node_id):
                await self._fleet.put_node(node_id, leader=epoch, **columns)
                self._nodes[node_id] = columns

    # -- workers ----------------------------------------------------------------------------------------------------

    async def _flush_workers(self, epoch: int, world: World) -> None:
        rows: list[dict[str, Any]] = []
        for run in world.runs:
            for worker in run.workers:
                part = (run.run_id, worker.name)
                row = self._row(world, run, worker)
                if row != self._shown.get(part) or part in self._signals.changed:
                    rows.append({"run_id": run.run_id, "name": worker.name, **self._progress(part, worker), **row})
                    self._shown[part] = row
        self._signals.changed.clear()
        if rows:
            # The world was observed before this pass's decisions were applied: a worker that was moved in it is
            # recorded with its new epoch already. That is no other leader's doing.
            await self._fleet.put_workers(rows, leader=epoch, skip_old=True)

    def _row(self, world: World, run: Run, worker: Worker) -> dict[str, Any]:
        state, reason = _state(world, run, worker)
        row: dict[str, Any] = {"role": worker.role, "state": state, "reason": reason}
        if worker.owner is not None:
            owner = worker.owner
            pids = self._signals.pids(owner.node_id, run.run_id, worker.name, owner.epoch)
            row |= {"node_id": owner.node_id, "epoch": owner.epoch, "start": owner.start, "pids": pids}
        if worker.status is not None and worker.status.exit is not None:
            ended = worker.status.exit
            row["exit"] = {"code": ended.code, "signal": ended.signal, "cause": ended.cause}
        if state not in ("running", "starting"):
            row["phase"] = ""
        return row

    def _progress(self, part: Part, worker: Worker) -> dict[str, Any]:
        signs = self._signals.workers.get(part)
        if signs is None or worker.owner is None or signs.progress.caller.epoch != worker.owner.epoch:
            return {}
        return self._columns(signs)

    def _columns(self, signs: ProgressSigns) -> dict[str, Any]:
        now, progress = self._clock.wall(), signs.progress
        return {
            "phase": progress.phase,
            "phase_since": now - dt.timedelta(seconds=self._age(signs.changed_at_s)),
            "policy_version": progress.policy_version,
            "counters": dict(progress.counters),
            "gauges": dict(progress.gauges),
            "note": progress.note,
            "last_progress_at": now - dt.timedelta(seconds=self._age(signs.received_at_s)),
        }

    def _age(self, moment_s: float) -> float:
        return max(self._clock.monotonic() - moment_s, 0.0)

    # -- figures ----------------------------------------------------------------------------------------------------

    async def _flush_applies(self, epoch: int) -> None:
        """Note when each rollout took over a version."""
        del epoch  # a history that only grows: nothing of it can be undone by an older leader
        for part, signs in self._signals.workers.items():
            version = signs.progress.policy_version
            before = self._applied.get(part)
            self._applied[part] = version
            if part[1] == "trainer" or before is None or version <= before:
                continue
            gauges = signs.progress.gauges
            await self._versions.add_apply(
                part[0],
                part[1],
                version,
                apply_ms=gauges.get("apply_ms"),
                pause_ms=gauges.get("generation_pause_ms"),
                fetch_ms=gauges.get("fetch_ms"),
            )

    async def _flush_time(self, epoch: int, world: World, elapsed_s: float) -> None:
        """Keep the books of the effective training time ratio: time meant for training, and time without a trainer."""
        for run in world.runs:
            if run.state not in ("running", "recovering") or run.head_version < 0 or elapsed_s <= 0:
                continue
            down = any(incident.worker == "trainer" for incident in run.incidents)
            await self._runs.add_time(
                run.run_id, running_s=elapsed_s, unavailable_s=elapsed_s if down else 0.0, leader=epoch
            )


def _state(world: World, run: Run, worker: Worker) -> tuple[str, str]:
    """The worker's state and reason for people."""
    if worker.owner is None:
        return "pending", ""
    if not worker.owner.running:
        gone = not worker.alive_on
        return "stopped", "" if gone else f"Its processes on {', '.join(worker.alive_on)} are ending."
    health = worker_health(world, run, worker)
    status = worker.status.state if worker.status is not None else ""
    if status == "exited":
        return "exited", health.reason
    if status == "paused":
        return "paused", health.reason or f"{worker.name} is stopped by a signal."
    if health.state == "doubtful" and world.store.reachable:
        return "unreachable", health.reason
    if health.state == "failed":
        return "lost", health.reason
    if worker.progress is None or worker.progress.phase in ("starting", "restoring"):
        return "starting", health.reason
    return "running", health.reason
