"""From rows to resources. No queries here."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, cast

from api.v1 import models
from orchestrator.db import tables
from whimbrel.spec import RunSpec

_ACTIVE = frozenset({"starting", "running", "recovering", "paused"})


@dataclass
class RunFacts:
    """What a run's resource says beyond its own row."""

    workers: list[tables.Worker] = field(default_factory=list)
    open_incidents: list[tables.Incident] = field(default_factory=list)
    latest: tables.Version | None = None


def run(row: tables.Run, facts: RunFacts) -> models.Run:
    return models.Run(
        id=row.id,
        name=row.name,
        spec=RunSpec.model_validate(row.spec),
        desired=row.desired_state,
        generation=row.generation,
        observed_generation=row.observed_generation,
        status=_run_status(row, facts),
        conditions=_conditions(row, facts),
        created_at=row.created_at,
        started_at=row.started_at,
        finished_at=row.finished_at,
        updated_at=row.updated_at,
    )


def _run_status(row: tables.Run, facts: RunFacts) -> models.RunStatus:
    metrics = facts.latest.metrics if facts.latest is not None else {}
    return models.RunStatus(
        state=row.state,
        reason=row.error or row.reason or _waits(row, facts),
        head_version=row.head_version,
        max_steps=row.max_steps,
        reward=_figure(metrics, "reward/mean"),
        tokens_per_s=_tokens_per_s(row, facts, metrics),
        staleness_mean=_figure(metrics, "staleness/mean"),
        staleness_max=_figure(metrics, "staleness/max"),
        ettr=1.0 - row.unavailable_s / row.running_s if row.running_s > 0 else None,
        recoveries=row.recoveries,
        eta_seconds=_eta_seconds(row),
        workers_running=sum(worker.state == "running" for worker in facts.workers),
        workers_total=len(facts.workers),
        open_incidents=len(facts.open_incidents),
    )


def _waits(row: tables.Run, facts: RunFacts) -> str:
    """What the workers of a running run wait for, in their own words; empty while all of them work."""
    if row.state != "running":
        return ""
    return " ".join(f"{one.name} waits: {one.note}" for one in facts.workers if one.phase == "waiting" and one.note)


def _tokens_per_s(row: tables.Run, facts: RunFacts, metrics: dict[str, Any]) -> float | None:
    """What the rollouts generate now; for an ended run what the last step saw."""
    if row.state in _ACTIVE:
        rates = [_figure(one.gauges, "tokens_per_s") for one in facts.workers if one.role == "rollout"]
        known = [rate for rate in rates if rate is not None]
        if known:
            return sum(known)
    return _figure(metrics, "perf/tokens_per_s")


def _eta_seconds(row: tables.Run) -> float | None:
    """From the pace so far, recoveries included."""
    if row.state not in _ACTIVE or row.head_version < 1 or row.running_s <= 0:
        return None
    return (row.max_steps - row.head_version) * row.running_s / row.head_version


def _conditions(row: tables.Run, facts: RunFacts) -> list[models.Condition]:
    running = sum(worker.state == "running" for worker in facts.workers)
    ready = bool(facts.workers) and running == len(facts.workers)
    oldest = min(facts.open_incidents, key=lambda incident: incident.detected_at, default=None)
    progressing = row.state == "running" and row.head_version >= 0
    return [
        models.Condition(
            type="Ready",
            status=_truth(ready),
            reason="AllWorkersRun" if ready else "WorkersMissing",
            message=f"{running} of {len(facts.workers)} workers run.",
            since=max((worker.updated_at for worker in facts.workers), default=None),
        ),
        models.Condition(
            type="Progressing",
            status=_truth(progressing),
            reason=row.state.capitalize(),
            message=row.error or row.reason or f"The run is {row.state}.",
            since=facts.latest.committed_at if facts.latest is not None else row.created_at,
        ),
        models.Condition(
            type="Healthy",
            status=_truth(oldest is None),
            reason="OpenIncident" if oldest is not None else "NoOpenIncident",
            message=oldest.summary if oldest is not None else "Nothing is broken.",
            since=oldest.detected_at if oldest is not None else None,
        ),
    ]


def worker(row: tables.Worker, now: datetime) -> models.Worker:
    return models.Worker(
        run_id=row.run_id,
        worker=row.name,
        role=row.role,
        node=row.node_id,
        state=row.state,
        reason=row.reason,
        epoch=row.epoch,
        start=row.start,
        policy_version=row.policy_version,
        phase=row.phase,
        phase_age_s=_age_s(row.phase_since, now),
        restarts=max(0, row.start - 1),
        gauges=row.gauges,
        counters=row.counters,
        note=row.note,
        exit=row.exit,
        started_at=row.started_at,
        updated_at=row.last_progress_at or row.updated_at,
    )


def version(row: tables.Version) -> models.Version:
    return models.Version(
        run_id=row.run_id,
        version=row.version,
        kind=row.kind,
        manifest=row.manifest,
        parent=row.parent,
        payload_bytes=row.payload_bytes,
        full_bytes=row.full_bytes or None,
        changed=row.changed,
        total=row.total,
        density=row.changed / row.total if row.total else None,
        snapshot=row.snapshot,
        anchor=row.anchor,
        state_digest=row.state_digest,
        metrics=numbers(row.metrics),
        committed_at=row.committed_at,
    )


def version_mark(row: tables.Version) -> models.VersionMark:
    return models.VersionMark(
        version=row.version, kind=row.kind, committed_at=row.committed_at, snapshot=bool(row.snapshot)
    )


def span(row: tables.WorkerSpan) -> models.Span:
    return models.Span(
        state=row.state,
        phase=row.phase,
        node=row.node_id,
        epoch=row.epoch,
        started_at=row.since,
        ended_at=row.until,
    )


def incident(row: tables.Incident, run_name: str | None) -> models.Incident:
    return models.Incident(
        id=row.id,
        run_id=row.run_id,
        run_name=run_name,
        kind=row.kind,
        subject=row.subject,
        severity=_severity(row.severity),
        worker=row.worker,
        node=row.node_id,
        message=row.summary,
        cause=row.cause,
        decision=_last_decision(row.decisions),
        decisions=row.decisions,
        failed_at=row.failed_at,
        detected_at=row.detected_at,
        decided_at=row.decided_at,
        recovered_at=row.recovered_at,
        open=row.state == "open",
        seconds=models.IncidentSeconds(
            detect=_between_s(row.failed_at, row.detected_at),
            decide=_between_s(row.detected_at, row.decided_at),
            recover=_between_s(row.decided_at or row.detected_at, row.recovered_at),
            total=_between_s(row.failed_at or row.detected_at, row.recovered_at),
        ),
        cost=row.cost,
        details=row.details,
        log_tail=row.log_tail,
    )


def incident_bracket(row: tables.Incident) -> models.IncidentBracket:
    return models.IncidentBracket(
        id=row.id,
        kind=row.kind,
        worker=row.worker,
        node=row.node_id,
        failed_at=row.failed_at,
        detected_at=row.detected_at,
        decided_at=row.decided_at,
        recovered_at=row.recovered_at,
        message=row.summary,
    )


def event(row: tables.Event, run_name: str | None) -> models.Event:
    return models.Event(
        id=row.id,
        at=row.at,
        run_id=row.run_id,
        run_name=run_name,
        kind=row.kind,
        severity=_severity(row.severity),
        subject=row.subject,
        message=row.message,
        details=row.data,
    )


def node(row: tables.Node, worker_names: list[str], now: datetime) -> models.Node:
    resources, usage = row.resources, row.usage
    return models.Node(
        id=row.id,
        state=row.state,
        reason=row.reason,
        address=row.address,
        region=row.region,
        schedulable=row.state == "ready" and not row.cordoned and not row.draining,
        draining=row.draining,
        lease_age_s=_age_s(row.last_report_at, now),
        last_seen_at=row.last_report_at,
        started_at=datetime.fromisoformat(row.started_at) if row.started_at else row.joined_at,
        cpus=int(resources.get("cpus", 0)),
        memory_bytes=int(resources.get("memory_bytes", 0)),
        gpus=int(resources.get("gpus", 0)),
        slots=int(resources.get("slots", 0)),
        slots_used=len(worker_names),
        cpu_ratio=usage.get("cpu_ratio"),
        memory_available_bytes=usage.get("memory_available_bytes"),
        disk_available_bytes=usage.get("disk_available_bytes"),
        load_1m=usage.get("load_1m"),
        workers=worker_names,
    )


def numbers(values: dict[str, Any]) -> dict[str, float]:
    """The members that are numbers; a JSON document cannot hold NaN, so a missing one is None there."""
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def _figure(values: dict[str, Any], name: str) -> float | None:
    value = values.get(name)
    return float(value) if isinstance(value, int | float) else None


def _last_decision(decisions: list[Any]) -> str:
    if not decisions:
        return ""
    last = decisions[-1]
    return ": ".join(part for part in (last.get("decision", ""), last.get("reason", "")) if part)


def _severity(text: str) -> Literal["info", "warning", "error"]:
    assert text in {"info", "warning", "error"}, text
    return cast("Literal['info', 'warning', 'error']", text)


def _truth(value: bool) -> Literal["true", "false"]:
    return "true" if value else "false"


def _age_s(moment: datetime | None, now: datetime) -> float | None:
    return None if moment is None else max(0.0, (now - moment).total_seconds())


def _between_s(begin: datetime | None, end: datetime | None) -> float | None:
    """Clocks of two machines may differ a little: never negative."""
    return None if begin is None or end is None else max(0.0, (end - begin).total_seconds())
