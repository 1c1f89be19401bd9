"""The record of a failure: opened when it is found, advanced when a new epoch is granted, closed when the part is played.

Incidents follow from the signs and from what is recorded already, never from what this process remembers: a controller
that starts in the middle of a recovery takes it up where it stands.
"""

from __future__ import annotations

from orchestrator.core.decisions import AdvanceIncident, CloseIncident, Decision, ReassignGroups, RecordIncident
from orchestrator.core.health import Failure, Health, leases_held_until, reports
from orchestrator.core.world import IncidentKind, Node, OpenIncident, Run, Worker, World
from whimbrel.limits import OUTAGE_AFTER_S


def failure_found(run: Run, worker: Worker, failure: Failure) -> list[Decision]:
    """Record the failure of the owned epoch, and return a rollout's groups to the pool, each once."""
    assert worker.owner is not None
    epoch, node_id = worker.owner.epoch, worker.owner.node_id
    open_one = next((one for one in run.incidents if one.worker == worker.name and one.epoch == epoch), None)
    found: list[Decision] = []
    if open_one is None:
        record = RecordIncident(
            kind=failure.kind,
            run_id=run.run_id,
            worker=worker.name,
            node_id=node_id,
            epoch=epoch,
            failed_s=failure.failed_s,
            charged=failure.charged,
            fingerprint=failure.fingerprint,
            reason=failure.message,
        )
        found.append(record)
    if worker.role == "rollout" and (open_one is None or open_one.groups_reassigned is None):
        text = f"{failure.message} Its prompt groups go back to the pool."
        found.append(ReassignGroups(run.run_id, worker.name, epoch, text))
    return found


def follow_up(world: World, run: Run, worker: Worker, health: Health) -> list[Decision]:
    """Advance and close the worker's open incidents as far as it has come."""
    steps: list[Decision] = []
    for incident in run.incidents:
        owner = worker.owner
        if incident.worker != worker.name or owner is None:
            continue
        if owner.epoch > incident.epoch and not incident.decided:
            reason = owner.reason or f"Started again on {owner.node_id}."
            steps.append(AdvanceIncident(incident.incident_id, owner.since_s, owner.node_id, reason))
        if health.state == "serving":
            if owner.epoch > incident.epoch:
                text = f"{worker.name} does its part again on {owner.node_id}."
            else:
                text = f"{worker.name} came back by itself; nothing was restarted."
            steps.append(CloseIncident(incident.incident_id, run.run_id, worker.name, world.now_s, text))
    return steps


def close_all(world: World, run: Run, reason: str) -> list[Decision]:
    """The run is over: nobody waits for these recoveries any more."""
    return [
        CloseIncident(incident.incident_id, run.run_id, incident.worker, world.now_s, reason)
        for incident in run.incidents
    ]


def agent_outages(world: World) -> list[Decision]:
    """Record when a node's agent could not be heard, or came back as another process. Its workers are judged apart."""
    if leases_held_until(world) is not None:
        return []
    steps: list[Decision] = []
    for node in sorted(world.nodes, key=lambda one: one.node_id):
        open_one = next((one for one in world.incidents if one.node_id == node.node_id), None)
        if open_one is not None:
            steps += _agent_back(world, node, open_one)
        elif node.lease.seen and not node.lease.present and node.state != "lost":
            text = f"The agent of {node.node_id} lost its lease. Its workers are left alone while they show life."
            steps.append(_agent_record("agent_lost", node, _last_report(node), text))
        elif node.recorded and node.registered and node.recorded != node.registered:
            text = f"The agent of {node.node_id} was started again. It takes over the workers that it finds."
            steps.append(_agent_record("agent_restart", node, _last_report(node), text))
    return steps


def _agent_back(world: World, node: Node, incident: OpenIncident) -> list[Decision]:
    if node.lease.present and reports(world, node) and node.incarnation == node.registered:
        text = f"The agent of {node.node_id} is registered and reports."
    elif node.state == "lost":
        text = f"{node.node_id} is lost; its workers move to other nodes as far as there is room."
    else:
        return []
    return [CloseIncident(incident.incident_id, "", "", world.now_s, text)]


def _agent_record(kind: IncidentKind, node: Node, failed_s: float, reason: str) -> RecordIncident:
    return RecordIncident(kind, "", "", node.node_id, 0, failed_s, False, "", reason)


def _last_report(node: Node) -> float:
    """When the agent was last heard before it changed."""
    heard_s = node.reported_at_s if node.reported_at_s is not None else node.lease.since_s
    if node.registered and node.incarnation == node.registered and node.incarnation_since_s is not None:
        return min(heard_s, node.incarnation_since_s)
    return heard_s


def store_outage(world: World) -> list[Decision]:
    """Record when etcd was away. Nothing else is decided meanwhile."""
    open_ones = [one for one in world.incidents if one.kind == "store_outage"]
    if world.store.reachable:
        if leases_held_until(world) is not None:
            return []
        text = "etcd answers again; nobody was declared dead for its absence."
        return [CloseIncident(one.incident_id, "", "", world.now_s, text) for one in open_ones]
    if open_ones or world.now_s - world.store.since_s < OUTAGE_AFTER_S:
        return []
    reason = (
        f"etcd does not answer ({world.store.reason or 'no connection'}). Membership is frozen, generation goes on,"
        " commits wait; check that etcd runs and can be reached."
    )
    record = RecordIncident("store_outage", "", "", "", 0, world.store.since_s, False, "", reason)
    return [record]
