"""What can be decided: a closed union of frozen dataclasses. Each says why, in a sentence for people."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.core.world import IncidentKind, NodeState, Role, RunState


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Give the worker's part to `node_id` under a new epoch; whoever holds it now is fenced by that."""

    run_id: str
    worker: str
    role: Role
    node_id: str
    replaces_epoch: int
    """The epoch that this was decided against; 0 when there was none. A newer one makes the decision void."""
    reason: str


@dataclass(frozen=True, slots=True)
class StopWorker:
    """Nobody owns the worker's part any more; its agent ends the processes."""

    run_id: str
    worker: str
    role: Role
    node_id: str
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class MarkNode:
    node_id: str
    state: NodeState
    reason: str


@dataclass(frozen=True, slots=True)
class SetRunState:
    """Record the run's state, and that the user's wish of `generation` was seen."""

    run_id: str
    state: RunState
    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class RecordIncident:
    """A failure was found. One per (run, worker, epoch); recording it again changes nothing."""

    kind: IncidentKind
    run_id: str
    worker: str
    node_id: str
    epoch: int
    failed_s: float
    """Last sign of life."""
    charged: bool
    """Whether it counts against the worker's restart budget."""
    fingerprint: str
    reason: str


@dataclass(frozen=True, slots=True)
class ReassignGroups:
    """Put what the failed epoch had leased back into the pool, with the partial tokens it had reported."""

    run_id: str
    worker: str
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class AdvanceIncident:
    """A new epoch was granted at `decided_s`."""

    incident_id: str
    decided_s: float
    node_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class CloseIncident:
    """The part is played again since `recovered_s`, or nobody needs it any more."""

    incident_id: str
    run_id: str
    worker: str
    recovered_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class RequestProbe:
    """Ask the node's agent directly; the answer is seen in a later world."""

    node_id: str
    reason: str


Decision = (
    StartWorker
    | StopWorker
    | MarkNode
    | SetRunState
    | RecordIncident
    | ReassignGroups
    | AdvanceIncident
    | CloseIncident
    | RequestProbe
)


@dataclass(frozen=True, slots=True)
class Plan:
    decisions: tuple[Decision, ...]
    """In the order in which they are applied."""
    wake_at_s: float
    """Look again no later than this, on the clock of the world that was decided on."""
