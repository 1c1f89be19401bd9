"""What the REST API answers: resources with spec, status and conditions; pages; times in RFC 3339 UTC."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, PlainSerializer, WithJsonSchema

from whimbrel.clock import rfc3339
from whimbrel.spec import RunSpec

Item = TypeVar("Item")


def _as_rfc3339(moment: datetime) -> str:
    """Databases without time zones give naive UTC."""
    return rfc3339(moment if moment.tzinfo else moment.replace(tzinfo=UTC))


Moment = Annotated[
    datetime,
    PlainSerializer(_as_rfc3339, return_type=str),
    WithJsonSchema({"type": "string", "format": "date-time"}),
]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Page(_Model, Generic[Item]):
    """Some items and how to get the next ones."""

    items: list[Item]
    next_cursor: str | None = None


class Condition(_Model):
    """One thing that is or is not so, since when and why."""

    type: str
    status: Literal["true", "false", "unknown"]
    reason: str
    message: str
    since: Moment | None = None


class RunStatus(_Model):
    state: str
    reason: str
    head_version: int
    """-1 before the first version is committed."""
    max_steps: int
    reward: float | None = None
    tokens_per_s: float | None = None
    staleness_mean: float | None = None
    staleness_max: float | None = None
    ettr: float | None = None
    recoveries: int = 0
    eta_seconds: float | None = None
    workers_running: int = 0
    workers_total: int = 0
    open_incidents: int = 0


class Run(_Model):
    id: str
    name: str
    spec: RunSpec
    desired: str
    generation: int
    observed_generation: int
    status: RunStatus
    conditions: list[Condition]
    created_at: Moment | None = None
    started_at: Moment | None = None
    finished_at: Moment | None = None
    updated_at: Moment | None = None


class Worker(_Model):
    run_id: str
    worker: str
    role: str
    node: str
    state: str
    reason: str
    epoch: int
    start: int
    policy_version: int
    phase: str
    phase_age_s: float | None = None
    restarts: int
    gauges: dict[str, float]
    counters: dict[str, float]
    note: str
    exit: dict[str, Any] | None = None
    """How the newest epoch that ended did so."""
    started_at: Moment | None = None
    updated_at: Moment | None = None


class Workers(_Model):
    items: list[Worker]


class WorkerLog(_Model):
    run_id: str
    worker: str
    node: str
    epoch: int
    text: str
    size_bytes: int


class Version(_Model):
    run_id: str
    version: int
    kind: str
    manifest: str
    parent: str
    payload_bytes: int
    full_bytes: int | None = None
    changed: int
    total: int
    density: float | None = None
    snapshot: str
    anchor: str
    state_digest: str
    metrics: dict[str, float]
    committed_at: Moment | None = None


class Series(_Model):
    series: dict[str, list[tuple[int, float]]]
    last_step: int
    """The last step that this answer covers; ask again with `after_step` set to it."""


class Span(_Model):
    state: str
    phase: str
    node: str
    epoch: int
    started_at: Moment
    ended_at: Moment | None = None


class Lane(_Model):
    worker: str
    role: str
    spans: list[Span]


class VersionMark(_Model):
    version: int
    kind: str
    committed_at: Moment | None = None
    snapshot: bool


class IncidentBracket(_Model):
    id: str
    kind: str
    worker: str
    node: str
    failed_at: Moment | None = None
    detected_at: Moment | None = None
    decided_at: Moment | None = None
    recovered_at: Moment | None = None
    message: str


class Timeline(_Model):
    since: Moment | None
    until: Moment
    lanes: list[Lane]
    versions: list[VersionMark]
    incidents: list[IncidentBracket]


class IncidentSeconds(_Model):
    detect: float | None = None
    decide: float | None = None
    recover: float | None = None
    total: float | None = None


class Incident(_Model):
    id: str
    run_id: str | None
    run_name: str | None
    kind: str
    subject: str
    """What it happened to, for people."""
    severity: Literal["info", "warning", "error"]
    worker: str
    node: str
    message: str
    cause: str
    decision: str
    """The last decision in words; `decisions` has all of them in order."""
    decisions: list[Any]
    failed_at: Moment | None = None
    detected_at: Moment | None = None
    decided_at: Moment | None = None
    recovered_at: Moment | None = None
    open: bool
    seconds: IncidentSeconds
    cost: dict[str, Any]
    details: dict[str, Any]
    log_tail: str


class Audit(_Model):
    """Every prompt group that was issued is somewhere: `balance` is what is missing, 0 when all is well."""

    run_id: str
    issued: int
    consumed: int
    batched: int
    buffered: int
    leased: int
    pooled: int
    dropped: int
    balance: int
    balanced: bool
    dropped_reasons: dict[str, int]
    trajectories: int
    trajectories_lost: int
    consumed_twice: int
    too_stale: int
    max_staleness: int
    late_results: int
    from_log: int
    sound: bool
    """It balances, and nothing was lost, used twice or too stale."""
    head_version: int


class Event(_Model):
    id: int
    at: Moment
    run_id: str | None
    run_name: str | None
    kind: str
    severity: Literal["info", "warning", "error"]
    subject: str
    message: str
    details: dict[str, Any]


class Events(_Model):
    items: list[Event]
    next_after: int


class Node(_Model):
    id: str
    state: str
    reason: str
    address: str
    region: str
    schedulable: bool
    draining: bool
    lease_age_s: float | None = None
    last_seen_at: Moment | None = None
    started_at: Moment | None = None
    cpus: int
    memory_bytes: int
    gpus: int
    slots: int
    slots_used: int
    cpu_ratio: float | None = None
    memory_available_bytes: int | None = None
    disk_available_bytes: int | None = None
    load_1m: float | None = None
    workers: list[str]


class Check(_Model):
    ok: bool
    reason: str = ""


class Readiness(_Model):
    ready: bool
    checks: dict[str, Check]


class LeaderInfo(_Model):
    leader: bool
    holder: str
    url: str


class VersionInfo(_Model):
    version: str
    protocol: int
    python: str


class Health(_Model):
    status: Literal["ok"] = "ok"
