"""The run's state machine: which changes are legal, and which state a run is in. Terminal is final."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from orchestrator.core.health import Health
from orchestrator.core.world import NO_VERSION, Run, RunState, World
from whimbrel.limits import STOP_CONFIRM_S

TERMINAL: Final[frozenset[RunState]] = frozenset({"completed", "failed", "stopped"})

TRANSITIONS: Final[Mapping[RunState, frozenset[RunState]]] = {
    "pending": frozenset({"starting", "stopped", "failed"}),
    "starting": frozenset({"running", "recovering", "paused", "completed", "failed", "stopped"}),
    "running": frozenset({"recovering", "paused", "completed", "failed", "stopped"}),
    "recovering": frozenset({"running", "paused", "completed", "failed", "stopped"}),
    "paused": frozenset({"starting", "running", "recovering", "completed", "failed", "stopped"}),
    "completed": frozenset(),
    "failed": frozenset(),
    "stopped": frozenset(),
}
"""From each state, where a run may go. What is not here is never written, whatever the signs say."""


def may_become(state: RunState, target: RunState) -> bool:
    return target == state or target in TRANSITIONS[state]


def may_start(run: Run) -> bool:
    """Whether a run that is not over has its parts played. One that never started waits until it may."""
    return run.desired == "running" or run.state != "pending"


def only_created(run: Run) -> bool:
    """Made without being started: stopped by no wish of its user's, so it is not over."""
    return run.state == "pending" and run.desired == "stopped" and run.generation <= 1


def trainer_is_done(run: Run, trainer: Health) -> bool:
    """Whether the last version is committed and the trainer's processes ended, however they ended."""
    return run.head_version >= run.max_steps and trainer.state in ("failed", "absent")


def stop_confirmed(world: World, run: Run) -> tuple[bool, str]:
    """Whether every process of the run is known to have ended; if not, who is waited for."""
    for worker in run.workers:
        if worker.owner is None:
            continue
        if worker.owner.running:
            return False, f"Stopping: {worker.name} was not told yet."
        node = world.node(worker.owner.node_id)
        told_s = worker.owner.since_s + STOP_CONFIRM_S
        for node_id in worker.alive_on:
            host = world.node(node_id)
            if host is not None and host.state != "lost":
                return False, f"Stopping: {worker.name} has not ended on {node_id} yet."
        if node is None or node.state == "lost":
            continue
        if node.reported_at_s is None or node.reported_at_s < told_s:
            return False, f"Stopping: {node.node_id} has not confirmed that {worker.name} ended."
    return True, ""


def active_state(run: Run, health: Mapping[str, Health]) -> RunState:
    """The state of a run whose parts should be played, from how its workers are."""
    if run.desired == "paused":
        return "paused"
    rollouts = [name for name in health if name != "trainer"]
    if health["trainer"].state == "serving" and any(health[name].state == "serving" for name in rollouts):
        return "running"
    if run.state not in ("running", "recovering") and run.head_version == NO_VERSION:
        return "starting"
    # Doubt changes nothing: a run that was running stays so while the signs disagree.
    if _is_down(run, health, "trainer") or all(_is_down(run, health, name) for name in rollouts):
        return "starting" if run.state in ("pending", "starting") else "recovering"
    return "running" if run.state == "paused" else run.state


def _is_down(run: Run, health: Mapping[str, Health], worker: str) -> bool:
    """Failed, or started anew and not back yet."""
    state = health[worker].state
    return state in ("failed", "absent") or (
        state == "starting" and any(incident.worker == worker for incident in run.incidents)
    )
