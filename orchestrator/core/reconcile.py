"""`decide`: from what is known to what shall be done. Pure: the same world gives the same plan.

Order within a plan matters, because it is applied in order and may be cut short anywhere: failures are recorded before
they are acted on, and an end that was reached is recorded before workers are stopped for it. Cut anywhere, the
next world leads to the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from orchestrator.core import incidents, lifecycle
from orchestrator.core.decisions import Decision, MarkNode, Plan, RequestProbe, SetRunState, StartWorker, StopWorker
from orchestrator.core.health import Health, leases_held_until, node_state, wants_probe, worker_health
from orchestrator.core.placement import Slots
from orchestrator.core.recovery import GiveUp, after_failure
from orchestrator.core.world import Run, RunState, Worker, World
from whimbrel.limits import LOOP_MAX_PERIOD_S, PROBE_EVERY_S


@dataclass
class _Draft:
    """A plan in the making."""

    world: World
    slots: Slots
    decisions: list[Decision] = field(default_factory=list[Decision])
    wake_at_s: float = 0.0

    def add(self, *decisions: Decision) -> None:
        self.decisions.extend(decisions)

    def wake(self, at_s: float) -> None:
        self.wake_at_s = min(self.wake_at_s, at_s)


def decide(world: World) -> Plan:
    """Decide on everything that is due in this world."""
    draft = _Draft(world, Slots.of(world), wake_at_s=world.now_s + LOOP_MAX_PERIOD_S)
    draft.add(*incidents.store_outage(world))
    # Without etcd no epoch can be granted and no lease be read: whatever is decided now would rest on old signs.
    if world.store.reachable:
        held_until_s = leases_held_until(world)
        if held_until_s is not None:
            draft.wake(held_until_s)
        draft.add(*incidents.agent_outages(world))
        _decide_nodes(draft)
        for run in sorted(world.runs, key=lambda one: one.run_id):
            _decide_run(draft, run)
    return Plan(tuple(draft.decisions), max(draft.wake_at_s, world.now_s))


def _decide_nodes(draft: _Draft) -> None:
    world = draft.world
    for node in sorted(world.nodes, key=lambda one: one.node_id):
        state, reason = node_state(world, node)
        if state != node.state:
            draft.add(MarkNode(node.node_id, state, reason))
        asked_long_ago = node.probe is None or world.now_s - node.probe.asked_at_s >= PROBE_EVERY_S
        if wants_probe(world, node) and asked_long_ago:
            draft.add(
                RequestProbe(node.node_id, f"{node.node_id} is not heard in every way; asking its agent directly.")
            )


def _decide_run(draft: _Draft, run: Run) -> None:
    health = {worker.name: worker_health(draft.world, run, worker) for worker in run.workers}
    if run.state in lifecycle.TERMINAL:
        _wind_up(draft, run, f"The run is {run.state}.")
    elif lifecycle.only_created(run):
        _set_state(draft, run, "pending", "Created, not started.")
    elif run.desired == "stopped":
        _stop(draft, run)
    elif lifecycle.trainer_is_done(run, health["trainer"]):
        _complete(draft, run)
    elif lifecycle.may_start(run):
        _keep_going(draft, run, health)
    else:
        _set_state(draft, run, run.state, "Paused before its start.")


def _wind_up(draft: _Draft, run: Run, reason: str) -> None:
    """Nobody plays a part of a run that is over."""
    for worker in run.workers:
        if worker.owner is not None and worker.owner.running:
            owner = worker.owner
            draft.add(StopWorker(run.run_id, worker.name, worker.role, owner.node_id, owner.epoch, reason))
    draft.add(*incidents.close_all(draft.world, run, reason))


def _stop(draft: _Draft, run: Run) -> None:
    confirmed, reason = lifecycle.stop_confirmed(draft.world, run)
    if confirmed:
        _set_state(draft, run, "stopped", "Stopped by the user.")
    else:
        _set_state(draft, run, run.state, reason)
    _wind_up(draft, run, "Stopped by the user.")


def _complete(draft: _Draft, run: Run) -> None:
    if run.mirrored_version < run.head_version:
        _set_state(draft, run, run.state, f"All {run.max_steps} steps are committed; recording the last of them.")
        return
    reason = f"All {run.max_steps} steps are committed."
    _set_state(draft, run, "completed", reason)
    _wind_up(draft, run, reason)


def _keep_going(draft: _Draft, run: Run, health: dict[str, Health]) -> None:
    """Fill every part that is empty or failed, as far as budgets and nodes allow."""
    remarks: list[str] = []
    started = False
    for worker in run.workers:
        one = health[worker.name]
        draft.add(*incidents.follow_up(draft.world, run, worker, one))
        outcome = _tend(draft, run, worker, one)
        if isinstance(outcome, GiveUp):
            _set_state(draft, run, "failed", outcome.reason)
            _wind_up(draft, run, outcome.reason)
            return
        started = started or outcome is None
        if outcome:
            remarks.append(outcome)
    state = lifecycle.active_state(run, health)
    owned = any(worker.owner is not None for worker in run.workers)
    if run.state == "pending" and not started and not owned:
        state = "pending"
    _set_state(draft, run, state, " ".join(dict.fromkeys(remarks)))


def _tend(draft: _Draft, run: Run, worker: Worker, health: Health) -> str | GiveUp | None:
    """Do what one worker needs. Returns a remark for the run's reason (or ""), None if it is started now, or GiveUp."""
    if health.state == "absent":
        return _start(draft, run, worker, "", frozenset(), f"{worker.name} is part of the run.")
    if health.failure is not None:
        draft.add(*incidents.failure_found(run, worker, health.failure))
        step = after_failure(draft.world, worker, health.failure)
        if isinstance(step, GiveUp):
            return step
        if step.due_s > draft.world.now_s:
            draft.wake(step.due_s)
            return f"{health.reason} It is started again shortly."
        return _start(draft, run, worker, step.prefer, step.avoid, health.reason)
    if health.state == "serving":
        return _move_off(draft, run, worker)
    return health.reason


def _start(draft: _Draft, run: Run, worker: Worker, prefer: str, avoid: frozenset[str], why: str) -> str | None:
    slots, owner = draft.slots, worker.owner
    slots.release(worker)
    node_id = slots.best(prefer=prefer, avoid=avoid)
    if node_id is None:
        if owner is not None and owner.running and owner.node_id in slots.free:
            slots.take(owner.node_id)
        return f"{worker.name} waits for a node. {slots.shortage()}"
    slots.take(node_id)
    reason = f"{why} Starting it on {node_id}."
    epoch = owner.epoch if owner is not None else 0
    draft.add(StartWorker(run.run_id, worker.name, worker.role, node_id, epoch, reason))
    return None


def _move_off(draft: _Draft, run: Run, worker: Worker) -> str | None:
    """Move a healthy worker off a draining node, if another has room; until then it works on."""
    assert worker.owner is not None
    node = draft.world.node(worker.owner.node_id)
    if node is None or not node.draining:
        return ""
    if draft.slots.best() is None:
        return f"{node.node_id} is draining, but {worker.name} has nowhere to go. {draft.slots.shortage()}"
    return _start(draft, run, worker, "", frozenset(), f"{node.node_id} is draining.")


def _set_state(draft: _Draft, run: Run, state: RunState, reason: str) -> None:
    if not lifecycle.may_become(run.state, state):
        state = run.state
    if (state, reason, run.generation) != (run.state, run.reason, run.observed_generation):
        draft.add(SetRunState(run.run_id, state, run.generation, reason))
