"""What the controller knows at one moment. Frozen data only: no I/O, no clock, no judgement.

All times that end in `_s` are seconds on the controller's own monotonic clock. A time that the controller could not
see (because it has just started to lead) is the moment from which it has been looking, so that silence is never
counted before there was anyone to hear.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

NodeState = Literal["ready", "draining", "cordoned", "unreachable", "lost"]
RunState = Literal["pending", "starting", "running", "recovering", "paused", "completed", "failed", "stopped"]
Desired = Literal["running", "paused", "stopped"]
Role = Literal["trainer", "rollout"]
ProcessState = Literal["starting", "running", "paused", "stopping", "exited"]
IncidentKind = Literal[
    "worker_exit",
    "worker_hang",
    "worker_paused",
    "worker_lost",
    "node_lost",
    "user_error",
    "start_timeout",
    "agent_lost",
    "agent_restart",
    "store_outage",
]

NO_VERSION = -1
"""The head of a run before its first version."""


@dataclass(frozen=True, slots=True)
class Store:
    """etcd as the controller sees it."""

    reachable: bool
    since_s: float = 0.0
    """When it became reachable or unreachable."""
    hold_until_s: float = 0.0
    """After an outage no lease is judged before this, so that every agent and worker can register again."""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Lease:
    """A registration under a lease: there, or gone."""

    present: bool
    since_s: float
    """When it appeared or vanished."""
    seen: bool = True
    """False while it never existed for this epoch or incarnation."""


@dataclass(frozen=True, slots=True)
class Probe:
    """What asking a node's agent directly brought."""

    asked_at_s: float
    answered: bool
    failing_since_s: float | None = None
    """The first of the failures in a row, or None after an answer."""


@dataclass(frozen=True, slots=True)
class Node:
    node_id: str
    state: NodeState
    """As recorded; `decide` says when it changes."""
    lease: Lease
    slots: int
    incarnation: str = ""
    """Of the agent that reported last."""
    reported_at_s: float | None = None
    """Last report of its agent to this controller."""
    incarnation_since_s: float | None = None
    """First report of the agent's present incarnation to this controller."""
    probe: Probe | None = None
    cordoned: bool = False
    draining: bool = False
    registered: str = ""
    """Incarnation of the registration in etcd; empty while there is none."""
    recorded: str = ""
    """Incarnation in the database: the one that was known before."""


@dataclass(frozen=True, slots=True)
class Exit:
    """How a worker's processes ended, as its agent found by waiting for them."""

    code: int | None
    signal: str = ""
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Status:
    """The agent's word about the processes of the owned epoch."""

    state: ProcessState
    at_s: float
    exit: Exit | None = None
    since_s: float = 0.0
    """When this state was first reported."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The worker's own word about the owned epoch."""

    phase: str
    received_at_s: float
    changed_at_s: float
    """When phase or any counter last changed."""
    version: int = NO_VERSION


@dataclass(frozen=True, slots=True)
class Owner:
    """Who plays the worker's part, from etcd."""

    node_id: str
    epoch: int
    running: bool
    since_s: float
    start: int = 1
    reason: str = ""


@dataclass(frozen=True, slots=True)
class PastFailure:
    """An earlier incident of this worker, inside the restart window."""

    at_s: float
    kind: str
    node_id: str
    epoch: int
    charged: bool
    fingerprint: str = ""
    """User errors: the sentence; the same one twice is no accident."""


@dataclass(frozen=True, slots=True)
class Worker:
    """One part of a run. Signs (`lease`, `status`, `progress`) are of the owned epoch only."""

    name: str
    role: Role
    owner: Owner | None = None
    lease: Lease = Lease(present=False, since_s=0.0, seen=False)
    status: Status | None = None
    progress: Progress | None = None
    alive_on: tuple[str, ...] = ()
    """Nodes whose agents report processes of this worker, of any epoch, that have not exited."""
    slowest_s: Mapping[str, float] = field(default_factory=dict[str, float])
    """Per phase: the longest time without change that ended well, over all workers of this role in the run."""
    failures: tuple[PastFailure, ...] = ()
    """Oldest first."""


@dataclass(frozen=True, slots=True)
class OpenIncident:
    """A failure whose recovery is not finished."""

    incident_id: str
    kind: str
    opened_s: float
    worker: str = ""
    node_id: str = ""
    epoch: int = 0
    decided: bool = False
    groups_reassigned: int | None = None


@dataclass(frozen=True, slots=True)
class Run:
    run_id: str
    name: str
    desired: Desired
    state: RunState
    generation: int
    """Counts the user's changes of what is desired."""
    max_steps: int
    rollouts: int
    max_staleness: int = 0
    reason: str = ""
    observed_generation: int = 0
    head_version: int = NO_VERSION
    mirrored_version: int = NO_VERSION
    workers: tuple[Worker, ...] = ()
    """Every worker that has an owner record or that the spec asks for, by name."""
    incidents: tuple[OpenIncident, ...] = ()


@dataclass(frozen=True, slots=True)
class World:
    now_s: float
    store: Store
    nodes: tuple[Node, ...] = ()
    runs: tuple[Run, ...] = ()
    incidents: tuple[OpenIncident, ...] = ()
    """Open incidents that belong to no run."""
    leading_since_s: float = 0.0
    node_index: Mapping[str, Node] = field(init=False, repr=False, compare=False, default_factory=dict[str, Node])
    placed: Mapping[str, tuple[Worker, ...]] = field(
        init=False, repr=False, compare=False, default_factory=dict[str, "tuple[Worker, ...]"]
    )
    """Workers that are owned on each node."""
    judged: dict[str, float | None] = field(
        init=False, repr=False, compare=False, default_factory=dict[str, "float | None"]
    )
    """What `health` found for the world as a whole, so that it is not found again for each worker."""

    def __post_init__(self) -> None:
        placed: dict[str, list[Worker]] = {}
        for run in self.runs:
            for worker in run.workers:
                if worker.owner is not None and worker.owner.running:
                    placed.setdefault(worker.owner.node_id, []).append(worker)
        object.__setattr__(self, "node_index", {node.node_id: node for node in self.nodes})
        object.__setattr__(self, "placed", {node_id: tuple(workers) for node_id, workers in placed.items()})

    def node(self, node_id: str) -> Node | None:
        return self.node_index.get(node_id)


def worker_names(rollouts: int) -> tuple[tuple[str, Role], ...]:
    """The workers that a run has, the trainer first."""
    return (("trainer", "trainer"), *((f"rollout-{index}", "rollout") for index in range(rollouts)))
