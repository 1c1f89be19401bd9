"""Who is alive. One sign that is missing is never a death: only an exit that the agent waited for is certain by itself.

A node is lost when its lease is gone, its agent reports nothing, a probe fails, and no worker on it shows life. A worker
has failed when its agent saw it end, when its lease is gone and it is paused or silent too, or when it makes no progress
for longer than its phase has ever taken. Everything else is a doubt, and a doubt changes nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from orchestrator.core.world import NO_VERSION, IncidentKind, Node, NodeState, Owner, Run, Status, Worker, World
from whimbrel.errors import EXIT_FENCED, EXIT_USER_ERROR
from whimbrel.limits import (
    ADOPT_GRACE_S,
    HANG_CAP_S,
    HANG_FACTOR,
    HANG_FLOOR_S,
    MASS_EXPIRY_MIN,
    MASS_EXPIRY_SHARE,
    MASS_EXPIRY_WINDOW_S,
    PAUSE_CONFIRM_S,
    PROBE_AFTER_S,
    STARTUP_DEADLINE_S,
    STORE_HOLD_S,
    WITNESS_SILENCE_S,
)

STARTING_PHASES = frozenset({"starting", "restoring"})
SERVING_PHASES = frozenset({"waiting", "working", "publishing", "applying"})


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an epoch cannot go on."""

    kind: IncidentKind
    failed_s: float
    """Last sign of life."""
    charged: bool
    message: str
    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class Health:
    """What is known of one worker. `absent`: nobody owns the part. `doubtful`: signs disagree, so nothing is done."""

    state: Literal["absent", "starting", "serving", "doubtful", "failed"]
    reason: str = ""
    failure: Failure | None = None


# -- the store ----------------------------------------------------------------------------------------------------------


def leases_held_until(world: World) -> float | None:
    """Until when no lease is judged, or None when leases may be judged now.

    Held while etcd is away, after its return until everyone is registered again (bounded), and when many nodes lost a
    lease at once: that is the store's trouble before it is theirs.
    """
    if "held_until_s" not in world.judged:
        world.judged["held_until_s"] = _held_until(world)
    return world.judged["held_until_s"]


def _held_until(world: World) -> float | None:
    if not world.store.reachable:
        return world.now_s + STORE_HOLD_S
    held_until = 0.0
    if world.now_s < world.store.hold_until_s and not _all_registered(world):
        held_until = world.store.hold_until_s
    mass = _mass_expiry(world)
    if mass is not None:
        held_until = max(held_until, mass + STORE_HOLD_S)
    return held_until if held_until > world.now_s else None


def _all_registered(world: World) -> bool:
    nodes = all(node.lease.present for node in world.nodes if node.state not in ("unreachable", "lost"))
    placed = (worker for workers in world.placed.values() for worker in workers)
    return nodes and all(worker.lease.present or not worker.lease.seen for worker in placed)


def _mass_expiry(world: World) -> float | None:
    """When the newest mass expiry ended: many nodes, each without its own or a worker's lease, within one window."""
    vanished: dict[str, float] = {}
    for node in world.nodes:
        leases = [node.lease, *(worker.lease for worker in world.placed.get(node.node_id, ()))]
        gone = [lease.since_s for lease in leases if lease.seen and not lease.present]
        if gone:
            vanished[node.node_id] = max(gone)
    times = sorted(vanished.values())
    for last in range(len(times) - 1, MASS_EXPIRY_MIN - 2, -1):
        within = sum(1 for moment in times[: last + 1] if times[last] - moment <= MASS_EXPIRY_WINDOW_S)
        if within >= MASS_EXPIRY_MIN and within / len(world.nodes) > MASS_EXPIRY_SHARE:
            return times[last]
    return None


# -- nodes --------------------------------------------------------------------------------------------------------------


def node_state(world: World, node: Node) -> tuple[NodeState, str]:
    """The state that the node should be recorded in, and why."""
    if leases_held_until(world) is not None:
        return node.state, ""
    if node.lease.present:
        if node.cordoned:
            return "cordoned", "Cordoned by the user: it takes no new workers."
        if node.draining:
            return "draining", "Draining: its workers move to other nodes as far as there is room."
        return "ready", "Its agent is registered."
    if reports(world, node):
        return "unreachable", "Its agent reports, but holds no lease in etcd; its workers are left alone."
    if not probe_failed(world, node):
        return _not_yet(node, "Its lease is gone and its agent is silent; asking it directly.")
    if any(shows_life(world, worker) for worker in world.placed.get(node.node_id, ())):
        return "unreachable", "Its agent does not answer, but its workers make progress; they are left alone."
    return "lost", "Its lease is gone, its agent neither reports nor answers, and no worker on it shows life."


def _not_yet(node: Node, reason: str) -> tuple[NodeState, str]:
    return ("lost", "") if node.state == "lost" else ("unreachable", reason)


def reports(world: World, node: Node) -> bool:
    """Whether the agent's reports still come in."""
    return node.reported_at_s is not None and world.now_s - node.reported_at_s < WITNESS_SILENCE_S


def probe_failed(world: World, node: Node) -> bool:
    """Whether asking the agent directly has failed for as long as a witness must be silent."""
    probe = node.probe
    if probe is None or probe.answered or probe.failing_since_s is None:
        return False
    return world.now_s - probe.failing_since_s >= WITNESS_SILENCE_S


def wants_probe(world: World, node: Node) -> bool:
    """Whether one sign of the node is missing, so that the other should be looked for in good time."""
    if not world.store.reachable or node.state == "lost":
        return False  # a node that is lost comes back by registering
    silent_since = world.leading_since_s if node.reported_at_s is None else node.reported_at_s
    return not node.lease.present or world.now_s - silent_since >= PROBE_AFTER_S


# -- workers ------------------------------------------------------------------------------------------------------------


def shows_life(world: World, worker: Worker) -> bool:
    """Whether the worker's own lease or its own progress says that it lives."""
    return worker.lease.present or not _silent(world, worker)


def worker_health(world: World, run: Run, worker: Worker) -> Health:
    """Judge one worker by every sign there is."""
    owner = worker.owner
    if owner is None or not owner.running:
        return Health("absent")
    if not world.store.reachable:
        return Health("doubtful", "etcd does not answer; nobody is judged before it is back.")
    status = worker.status
    if status is not None and status.state == "exited":
        return _failed(_exit_failure(run, worker, status))
    hang = _hang(world, worker)
    if hang is not None:
        return _failed(hang)
    if leases_held_until(world) is not None:
        return Health("doubtful", "Leases are not judged until every agent could register again.")
    node = world.node(owner.node_id)
    if node is None or node_state(world, node)[0] == "lost":
        return _node_lost(world, worker, owner)
    missing = _forgotten(world, worker, owner, node)
    if missing is not None:
        return _failed(missing)
    if worker.lease.present:
        return _with_lease(run, worker)
    if not worker.lease.seen and worker.progress is None:
        return _not_registered(world, worker, owner)
    return _without_lease(world, worker, owner, node)


def caught_up(run: Run, worker: Worker) -> bool:
    """Whether the epoch does its part again: a trainer at the head, a rollout with weights within the bound."""
    progress = worker.progress
    if progress is None or progress.phase not in SERVING_PHASES or not worker.lease.present:
        return False
    if worker.role == "trainer":
        return progress.version >= max(run.head_version, 0) or (
            run.head_version == NO_VERSION and progress.version >= 0
        )
    return progress.version >= max(run.head_version - max(run.max_staleness, 1), 0)


def hang_bound_s(worker: Worker, phase: str) -> float | None:
    """How long this phase may go without change; None for waiting, which may last as long as others need."""
    if phase == "waiting":
        return None
    slowest_s = worker.slowest_s.get(phase, 0.0)
    bound_s = min(max(HANG_FLOOR_S, HANG_FACTOR * slowest_s), HANG_CAP_S)
    return max(bound_s, STARTUP_DEADLINE_S) if phase in STARTING_PHASES else bound_s


def _failed(failure: Failure) -> Health:
    return Health("failed", failure.message, failure)


def _exit_failure(run: Run, worker: Worker, status: Status) -> Failure:
    ended = status.exit
    code, cause, signal = (ended.code, ended.cause, ended.signal) if ended else (None, "", "")
    failed_s = min(status.since_s or status.at_s, status.at_s)
    because = f": {_clause(cause)}" if cause else "."
    if code == EXIT_FENCED:
        return Failure(
            "worker_exit", failed_s, False, f"{worker.name} stopped because it took itself for replaced{because}"
        )
    if code == EXIT_USER_ERROR:
        return Failure(
            "user_error",
            failed_s,
            True,
            f"{worker.name} ended with an error on the user's side{because}",
            # The same mistake is met at other prompts and lines each time.
            re.sub(r"\d+", "#", cause),
        )
    if code == 0 and worker.role == "trainer":
        text = f"{worker.name} ended without error at version {run.head_version}, before version {run.max_steps}."
        return Failure("worker_exit", failed_s, True, text)
    # Somebody asked the process to go: a shutdown or a preemption of its machine, not the worker's own fault.
    asked = signal == "SIGTERM" or code == 0
    how = f"was ended by {signal}" if signal else f"ended with code {code}" if code is not None else "ended"
    return Failure("worker_exit", failed_s, not asked, f"{worker.name} {how}{because}")


def _clause(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else text + "."


def _hang(world: World, worker: Worker) -> Failure | None:
    """No progress for longer than the phase's bound, by the worker's own word: its reporting thread lives, its work not."""
    progress = worker.progress
    if progress is None or _silent(world, worker):
        return None
    bound_s = hang_bound_s(worker, progress.phase)
    # A commit that waited for etcd, or a call that waited for a controller, is no hang of the worker.
    stalled_since_s = max(progress.changed_at_s, world.store.since_s, world.leading_since_s)
    if bound_s is None or world.now_s - stalled_since_s <= bound_s:
        return None
    text = f"{worker.name} made no progress in phase {progress.phase} for over {bound_s:.0f} s."
    return Failure("worker_hang", progress.changed_at_s, True, text)


def _node_lost(world: World, worker: Worker, owner: Owner) -> Health:
    # Another sign of life outweighs the record: the node is marked reachable again in the same pass.
    if shows_life(world, worker):
        return Health("doubtful", f"{owner.node_id} was lost, but {worker.name} shows life.")
    failed_s = _last_sign(worker, owner)
    return _failed(Failure("node_lost", failed_s, False, f"{worker.name} was lost with its node {owner.node_id}."))


def _forgotten(world: World, worker: Worker, owner: Owner, node: Node) -> Failure | None:
    """The agent reports, but knows nothing of the epoch: it was started anew and the processes are gone."""
    if worker.status is not None or not node.lease.present or not reports(world, node) or shows_life(world, worker):
        return None
    known_since_s = max(owner.since_s, node.incarnation_since_s or world.now_s)
    if world.now_s - known_since_s < ADOPT_GRACE_S:
        return None
    text = f"The agent of {owner.node_id} has no process of {worker.name} any more."
    return Failure("worker_lost", _last_sign(worker, owner), True, text)


def _with_lease(run: Run, worker: Worker) -> Health:
    if caught_up(run, worker):
        return Health("serving")
    phase = worker.progress.phase if worker.progress else "starting"
    return Health("starting", f"{worker.name} is {phase}.")


def _not_registered(world: World, worker: Worker, owner: Owner) -> Health:
    if world.now_s - owner.since_s <= STARTUP_DEADLINE_S:
        return Health("starting", f"{worker.name} is starting on {owner.node_id}.")
    text = f"{worker.name} did not register within {STARTUP_DEADLINE_S:.0f} s of its start on {owner.node_id}."
    return _failed(Failure("start_timeout", owner.since_s, True, text))


def _without_lease(world: World, worker: Worker, owner: Owner, node: Node) -> Health:
    silent = _silent(world, worker)
    paused = worker.status is not None and worker.status.state == "paused" and reports(world, node)
    # A node that has just come back brings its workers with it, but not in the same instant.
    settled = world.now_s - node.lease.since_s >= WITNESS_SILENCE_S
    agent_known = settled and (node.lease.present or reports(world, node))
    failed_s = _last_sign(worker, owner)
    if paused:
        if not _paused_long(world, worker):
            return Health("doubtful", f"{worker.name} is stopped by a signal.")
        text = f"{worker.name} is stopped by a signal and lost its lease."
        return _failed(Failure("worker_paused", failed_s, False, text))
    if not silent:
        return Health("doubtful", f"{worker.name} lost its lease but makes progress; it will register again.")
    if agent_known:
        text = f"{worker.name} lost its lease and reports no progress."
        return _failed(Failure("worker_lost", failed_s, True, text))
    if probe_failed(world, node):
        text = f"{worker.name} lost its lease, reports no progress, and the agent of {owner.node_id} does not answer."
        return _failed(Failure("worker_lost", failed_s, False, text))
    return Health("doubtful", f"Neither {worker.name} nor its node can be heard; asking {owner.node_id} directly.")


def _paused_long(world: World, worker: Worker) -> bool:
    """A process that was stopped for a moment may be waking up just now; one second of both signs is no moment."""
    return world.now_s - worker.lease.since_s >= PAUSE_CONFIRM_S


def _silent(world: World, worker: Worker) -> bool:
    """No progress report for as long as a witness must be silent, counted from when there was anyone to hear."""
    heard_s = world.leading_since_s
    if worker.owner is not None:
        heard_s = max(heard_s, worker.owner.since_s)
    if worker.progress is not None:
        heard_s = max(heard_s, worker.progress.received_at_s)
    return world.now_s - heard_s >= WITNESS_SILENCE_S


def _last_sign(worker: Worker, owner: Owner) -> float:
    signs = [owner.since_s]
    if worker.progress is not None:
        signs.append(worker.progress.received_at_s)
    elif worker.lease.seen:
        signs.append(worker.lease.since_s)
    return max(signs)
