"""The tables: what the controller knows about runs, the fleet, the log and the ledger.

Every change here needs a migration; a test compares the two. Defaults are filled in by Python, not by the database,
so that both databases and the models agree about them.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, ClassVar

from sqlalchemy import ForeignKey, Index, MetaData, String, Text, UniqueConstraint
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from orchestrator.db.types import BIG, DOCUMENT, Moment

NO_VERSION = -1
"""The head of a run before its first version."""


class Table(DeclarativeBase):
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map: ClassVar[dict[Any, Any]] = {
        datetime: Moment(),
        dict[str, Any]: DOCUMENT,
        list[Any]: DOCUMENT,
        str: String(255),
        int: BIG,
    }


def _run_reference() -> ForeignKey:
    return ForeignKey("runs.id", ondelete="CASCADE")


class Run(Table):
    """One RL post-training job: what is wanted, what is, and the figures that the ledger needs at hand."""

    __tablename__ = "runs"

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(index=True)
    spec: Mapped[dict[str, Any]]
    """RunSpec as JSON; never changed after creation."""
    desired_state: Mapped[str] = mapped_column(default="running")
    """running | paused | stopped"""
    state: Mapped[str] = mapped_column(default="pending", index=True)
    """pending | starting | running | recovering | paused | completed | failed | stopped; the last three are final."""
    reason: Mapped[str] = mapped_column(Text, default="")
    generation: Mapped[int] = mapped_column(default=1)
    """Counts the user's changes of what is desired."""
    observed_generation: Mapped[int] = mapped_column(default=0)
    head_version: Mapped[int] = mapped_column(default=NO_VERSION)
    """Newest committed version that the controller has seen in etcd."""
    head_manifest: Mapped[str] = mapped_column(default="")
    mirrored_version: Mapped[int] = mapped_column(default=NO_VERSION)
    """Every version up to this one is in `versions`, and its batch is marked consumed."""

    group_size: Mapped[int]
    groups_per_step: Mapped[int]
    max_versions: Mapped[int]
    """Staleness bound."""
    max_steps: Mapped[int]
    next_index: Mapped[int] = mapped_column(default=0)
    """Prompt groups issued so far; the next new one takes this index."""
    late_results: Mapped[int] = mapped_column(default=0)
    """Results refused because their lease was lost or their epoch replaced."""
    failed_groups: Mapped[int] = mapped_column(default=0)
    """Reports of an environment that could not make or score a prompt."""

    recoveries: Mapped[int] = mapped_column(default=0)
    running_s: Mapped[float] = mapped_column(default=0.0)
    """Wall time since the first version during which the run was meant to run: the denominator of the ETTR."""
    unavailable_s: Mapped[float] = mapped_column(default=0.0)
    """The part of `running_s` in which the trainer could not work. ETTR = 1 - unavailable_s / running_s."""
    error: Mapped[str] = mapped_column(Text, default="")
    """Why the run failed, for people."""
    created_at: Mapped[datetime]
    updated_at: Mapped[datetime]
    started_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]


class Node(Table):
    __tablename__ = "nodes"

    id: Mapped[str] = mapped_column(primary_key=True)
    """The node's name."""
    incarnation: Mapped[str] = mapped_column(default="")
    address: Mapped[str] = mapped_column(default="")
    region: Mapped[str] = mapped_column(default="local")
    state: Mapped[str] = mapped_column(default="ready")
    """ready | cordoned | draining | unreachable | lost | left"""
    reason: Mapped[str] = mapped_column(Text, default="")
    cordoned: Mapped[bool] = mapped_column(default=False)
    """Set by the user: takes no new workers."""
    draining: Mapped[bool] = mapped_column(default=False)
    """Set by the user or the agent: its workers move away."""
    resources: Mapped[dict[str, Any]] = mapped_column(default=dict)
    """wire.cluster.Resources: cpus, memory_bytes, gpus, gpu_name, slots."""
    usage: Mapped[dict[str, Any]] = mapped_column(default=dict)
    """From the latest report: cpu_ratio, memory_available_bytes, disk_available_bytes, load_1m."""
    started_at: Mapped[str] = mapped_column(default="")
    """Start of this incarnation, by the node's own clock."""
    joined_at: Mapped[datetime | None]
    last_report_at: Mapped[datetime | None]
    updated_at: Mapped[datetime]


class Worker(Table):
    """The newest epoch of one part of a run."""

    __tablename__ = "workers"

    run_id: Mapped[str] = mapped_column(_run_reference(), primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    role: Mapped[str]
    node_id: Mapped[str] = mapped_column(default="")
    epoch: Mapped[int] = mapped_column(default=0)
    """Fencing epoch: writes under a lower one are refused."""
    start: Mapped[int] = mapped_column(default=0)
    """Counts the starts of this worker within its run."""
    state: Mapped[str] = mapped_column(default="pending")
    """pending | starting | running | paused | unreachable | exited | lost | stopped"""
    reason: Mapped[str] = mapped_column(Text, default="")
    pids: Mapped[list[Any]] = mapped_column(default=list)
    phase: Mapped[str] = mapped_column(default="")
    phase_since: Mapped[datetime | None]
    policy_version: Mapped[int] = mapped_column(default=NO_VERSION)
    counters: Mapped[dict[str, Any]] = mapped_column(default=dict)
    gauges: Mapped[dict[str, Any]] = mapped_column(default=dict)
    note: Mapped[str] = mapped_column(Text, default="")
    last_progress_at: Mapped[datetime | None]
    exit: Mapped[dict[str, Any] | None] = mapped_column(DOCUMENT)
    """wire.work.WorkerExit of the newest epoch that ended."""
    started_at: Mapped[datetime | None]
    updated_at: Mapped[datetime]


class WorkerSpan(Table):
    """The fleet timeline: a worker was in this state from `since` to `until` (None: still)."""

    __tablename__ = "worker_spans"
    __table_args__ = (Index("ix_worker_spans_run_worker_since", "run_id", "worker", "since"),)

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    run_id: Mapped[str] = mapped_column(_run_reference())
    worker: Mapped[str]
    role: Mapped[str]
    node_id: Mapped[str] = mapped_column(default="")
    epoch: Mapped[int]
    state: Mapped[str]
    phase: Mapped[str] = mapped_column(default="")
    since: Mapped[datetime]
    until: Mapped[datetime | None] = mapped_column(index=True)


class Version(Table):
    """One committed version, mirrored from the log."""

    __tablename__ = "versions"

    run_id: Mapped[str] = mapped_column(_run_reference(), primary_key=True)
    version: Mapped[int] = mapped_column(primary_key=True)
    manifest: Mapped[str]
    parent: Mapped[str] = mapped_column(default="")
    kind: Mapped[str]
    """anchor | delta"""
    epoch: Mapped[int]
    payload_bytes: Mapped[int] = mapped_column(default=0)
    full_bytes: Mapped[int] = mapped_column(default=0)
    changed: Mapped[int] = mapped_column(default=0)
    total: Mapped[int] = mapped_column(default=0)
    """Elements that changed, of how many."""
    anchor: Mapped[str] = mapped_column(default="")
    """Digest of the nearest anchor's manifest."""
    snapshot: Mapped[str] = mapped_column(default="")
    """Digest of the snapshot at this version, or empty."""
    state_digest: Mapped[str] = mapped_column(default="")
    replayed: Mapped[bool] = mapped_column(default=False)
    """A trainer has recomputed this version during a restore."""
    step_seconds: Mapped[float | None]
    metrics: Mapped[dict[str, Any]] = mapped_column(default=dict)
    committed_at: Mapped[datetime]


class Apply(Table):
    """A rollout took over a version; the newest few per run are kept."""

    __tablename__ = "applies"
    __table_args__ = (Index("ix_applies_run_version", "run_id", "version"),)

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    run_id: Mapped[str] = mapped_column(_run_reference())
    worker: Mapped[str]
    version: Mapped[int]
    applied_at: Mapped[datetime]
    apply_ms: Mapped[float | None]
    pause_ms: Mapped[float | None]
    fetch_ms: Mapped[float | None]


class PromptGroup(Table):
    """One prompt and its samples: the unit of dispatch."""

    __tablename__ = "prompt_groups"
    __table_args__ = (
        UniqueConstraint("run_id", "index"),
        Index("ix_prompt_groups_run_state", "run_id", "state"),
        Index("ix_prompt_groups_run_step", "run_id", "step"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    run_id: Mapped[str] = mapped_column(_run_reference())
    index: Mapped[int]
    state: Mapped[str]
    """pooled | leased | buffered | batched | consumed | dropped"""
    attempt: Mapped[int] = mapped_column(default=0)
    """Counts the leases of this group."""
    worker: Mapped[str] = mapped_column(default="")
    """Who holds the lease, or who finished the group."""
    worker_epoch: Mapped[int] = mapped_column(default=0)
    lease_deadline: Mapped[datetime | None]
    consume_by: Mapped[int | None]
    """The last step that may train on this group; None while it has no token."""
    partial: Mapped[str] = mapped_column(default="")
    """Digest of the payload with the tokens that an unfinished attempt reported."""
    partial_tokens: Mapped[int] = mapped_column(default=0)
    partial_min_version: Mapped[int] = mapped_column(default=NO_VERSION)
    payload: Mapped[str] = mapped_column(default="")
    payload_bytes: Mapped[int] = mapped_column(default=0)
    tokens: Mapped[int] = mapped_column(default=0)
    min_version: Mapped[int] = mapped_column(default=NO_VERSION)
    max_version: Mapped[int] = mapped_column(default=NO_VERSION)
    step: Mapped[int | None]
    """The step whose batch it is in (batched) or that trained on it (consumed)."""
    consumed_count: Mapped[int] = mapped_column(default=0)
    """Committed steps that trained on it; more than one breaks the law, and the audit says so."""
    from_log: Mapped[bool] = mapped_column(default=False)
    """The ledger learnt of this group only from a committed step record: it has no trajectories here."""
    reason: Mapped[str] = mapped_column(Text, default="")
    """Why it was dropped or last returned to the pool."""
    created_at: Mapped[datetime]
    updated_at: Mapped[datetime]


class Trajectory(Table):
    """What the ledger keeps of one sample of a finished group."""

    __tablename__ = "trajectories"
    __table_args__ = (Index("ix_trajectories_run", "run_id"),)

    group_id: Mapped[str] = mapped_column(ForeignKey("prompt_groups.id", ondelete="CASCADE"), primary_key=True)
    sample: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[str] = mapped_column(_run_reference())
    tokens: Mapped[int]
    reward: Mapped[float]
    min_version: Mapped[int]
    max_version: Mapped[int]
    finish_reason: Mapped[str]


class Batch(Table):
    """The groups of one step, in training order."""

    __tablename__ = "batches"

    run_id: Mapped[str] = mapped_column(_run_reference(), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    epoch: Mapped[int]
    """Trainer epoch for which it was made, or that committed it."""
    group_ids: Mapped[list[Any]]
    committed: Mapped[bool] = mapped_column(default=False)
    created_at: Mapped[datetime]


class Incident(Table):
    """A failure from detection to recovery."""

    __tablename__ = "incidents"

    id: Mapped[str] = mapped_column(primary_key=True)
    run_id: Mapped[str | None] = mapped_column(_run_reference(), index=True)
    kind: Mapped[str]
    subject: Mapped[str]
    """What it happened to, for people: `trainer`, `node n1`, `etcd`."""
    worker: Mapped[str] = mapped_column(default="")
    node_id: Mapped[str] = mapped_column(default="")
    epoch: Mapped[int] = mapped_column(default=0)
    severity: Mapped[str] = mapped_column(default="error")
    """info | warning | error"""
    state: Mapped[str] = mapped_column(default="open", index=True)
    """open | closed"""
    summary: Mapped[str] = mapped_column(Text, default="")
    """One sentence: what happened, what was done, what the user may do."""
    cause: Mapped[str] = mapped_column(Text, default="")
    failed_at: Mapped[datetime | None]
    """Last sign of life."""
    detected_at: Mapped[datetime]
    decided_at: Mapped[datetime | None]
    recovered_at: Mapped[datetime | None]
    decisions: Mapped[list[Any]] = mapped_column(default=list)
    """[{"at": RFC 3339, "decision": str, "reason": str}], in order."""
    cost: Mapped[dict[str, Any]] = mapped_column(default=dict)
    """steps_lost, replayed_steps, groups_reassigned, tokens_wasted, ..."""
    details: Mapped[dict[str, Any]] = mapped_column(default=dict)
    log_tail: Mapped[str] = mapped_column(Text, default="")


class Event(Table):
    """One line of history."""

    __tablename__ = "events"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    at: Mapped[datetime]
    run_id: Mapped[str | None] = mapped_column(index=True)
    """No reference: an event outlives what it tells of."""
    subject: Mapped[str] = mapped_column(default="")
    kind: Mapped[str]
    severity: Mapped[str] = mapped_column(default="info")
    message: Mapped[str] = mapped_column(Text)
    data: Mapped[dict[str, Any]] = mapped_column(default=dict)


class Leadership(Table):
    """One row: the newest leader that wrote to this database."""

    __tablename__ = "leadership"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    epoch: Mapped[int] = mapped_column(default=0)
    holder: Mapped[str] = mapped_column(default="")
    since: Mapped[datetime]


class Restart(Table):
    """A worker ended and was replaced, or will be."""

    __tablename__ = "restarts"
    __table_args__ = (Index("ix_restarts_run_worker_at", "run_id", "worker", "at"),)

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    run_id: Mapped[str] = mapped_column(_run_reference())
    worker: Mapped[str]
    node_id: Mapped[str] = mapped_column(default="")
    epoch: Mapped[int] = mapped_column(default=0)
    """The epoch that ended."""
    kind: Mapped[str]
    """Of the incident."""
    at: Mapped[datetime]
    charged: Mapped[bool] = mapped_column(default=True)
    """Counts against the restart budget."""
    fingerprint: Mapped[str] = mapped_column(Text, default="")
    """User errors: the sentence; the same one twice is no accident."""


class IdempotencyKey(Table):
    """The answer that was given to a request with an Idempotency-Key."""

    __tablename__ = "idempotency_keys"

    key: Mapped[str] = mapped_column(primary_key=True)
    request_digest: Mapped[str]
    """Of method, path and body: the same key with another request is an error."""
    status: Mapped[int]
    body: Mapped[dict[str, Any]]
    headers: Mapped[dict[str, Any]] = mapped_column(default=dict)
    created_at: Mapped[datetime] = mapped_column(index=True)
