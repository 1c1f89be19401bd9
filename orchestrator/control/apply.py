"""Carry out a plan, decision by decision, in order. Every effect may be repeated, and every one is fenced.

Writes to etcd compare the leader key's create_revision, writes to the database the leadership epoch. A deposed leader
therefore changes nothing, however late it wakes up; it learns so by `Fenced`.
"""

from __future__ import annotations

import datetime as dt
from typing import assert_never

from orchestrator.control.chronicle import Chronicle
from orchestrator.control.observe import Registry
from orchestrator.control.probe import Probes
from orchestrator.control.records import Known
from orchestrator.core.decisions import (
    AdvanceIncident,
    CloseIncident,
    Decision,
    MarkNode,
    Plan,
    ReassignGroups,
    RecordIncident,
    RequestProbe,
    SetRunState,
    StartWorker,
    StopWorker,
)
from orchestrator.core.world import World
from orchestrator.db import FleetRepository, Ledger
from whimbrel import wire
from whimbrel.coordination import Compare, Etcd, Put, keys
from whimbrel.errors import Fenced
from whimbrel.wire.cluster import Ownership


class Apply:
    """The effects of one term of leadership."""

    def __init__(
        self,
        etcd: Etcd,
        epoch: int,
        *,
        chronicle: Chronicle,
        fleet: FleetRepository,
        ledger: Ledger,
        probes: Probes,
    ) -> None:
        self.epoch = epoch
        self._etcd = etcd
        self._chronicle = chronicle
        self._fleet = fleet
        self._ledger = ledger
        self._probes = probes

    async def apply(self, plan: Plan, world: World, known: Known, registry: Registry) -> None:
        """Carry out the plan.

        Raises:
            Fenced: another controller leads; nothing of the rest was done.
            Unreachable: etcd or the database does not answer; whether the last effect took place is not known, and the
                next plan finds out.
        """
        for decision in plan.decisions:
            await self._one(decision, world, known, registry)

    async def _one(self, decision: Decision, world: World, known: Known, registry: Registry) -> None:
        match decision:
            case StartWorker():
                await self._start(decision, known, registry)
            case StopWorker():
                await self._stop(decision, registry)
            case MarkNode():
                await self._mark(decision)
            case SetRunState():
                await self._chronicle.set_run_state(self.epoch, decision)
            case RecordIncident():
                await self._chronicle.record(self.epoch, decision, _wall(known, world, decision.failed_s))
            case ReassignGroups():
                await self._reassign(decision)
            case AdvanceIncident():
                await self._chronicle.advance(self.epoch, decision, _wall(known, world, decision.decided_s))
            case CloseIncident():
                await self._chronicle.close(self.epoch, decision, _wall(known, world, decision.recovered_s))
            case RequestProbe():
                record = registry.nodes.get(decision.node_id)
                row = next((one for one in known.nodes if one.node_id == decision.node_id), None)
                address = record.address if record is not None else row.address if row is not None else ""
                self._probes.request(decision.node_id, address)
            case _:
                assert_never(decision)

    async def _start(self, decision: StartWorker, known: Known, registry: Registry) -> None:
        before = registry.owners.get((decision.run_id, decision.worker))
        owner = Ownership(
            run_id=decision.run_id,
            worker=decision.worker,
            role=decision.role,
            node_id=decision.node_id,
            state="running",
            reason=decision.reason,
            start=before[0].start + 1 if before is not None else 1,
        )
        spec: list[Put] = []
        if decision.replaces_epoch == 0:
            row = next(one for one in known.runs if one.run_id == decision.run_id)
            # In the same revision as the first owner, so that no agent sees the one without the other.
            spec.append(Put(keys.spec(decision.run_id), row.spec.model_dump_json().encode()))
        epoch = await self._own(owner, decision.replaces_epoch, spec)
        if epoch is None:
            return
        await self._fleet.put_worker(
            decision.run_id,
            decision.worker,
            leader=self.epoch,
            role=decision.role,
            node_id=decision.node_id,
            epoch=epoch,
            start=owner.start,
            state="starting",
            phase="starting",
            reason=decision.reason,
        )
        if decision.role == "rollout":
            await self._ledger.reassign(decision.run_id, decision.worker, epoch, leader=self.epoch)
        await self._chronicle.tell(
            self.epoch, "worker_started", decision.reason, run_id=decision.run_id, subject=decision.worker
        )

    async def _stop(self, decision: StopWorker, registry: Registry) -> None:
        before = registry.owners.get((decision.run_id, decision.worker))
        owner = Ownership(
            run_id=decision.run_id,
            worker=decision.worker,
            role=decision.role,
            node_id=decision.node_id,
            state="stopped",
            reason=decision.reason,
            start=before[0].start if before is not None else 0,
        )
        if await self._own(owner, decision.epoch, []) is not None:
            text = f"{decision.worker} is told to end. {decision.reason}"
            await self._chronicle.tell(
                self.epoch, "worker_stopping", text, run_id=decision.run_id, subject=decision.worker
            )

    async def _own(self, owner: Ownership, replaces_epoch: int, more: list[Put]) -> int | None:
        """Write an owner record against the epoch that was decided on; the new epoch, or None if that was outdated."""
        key = keys.owner(owner.run_id, owner.worker)
        compares = [Compare(keys.LEADER, "create", self.epoch), Compare(key, "mod", replaces_epoch)]
        result = await self._etcd.txn(compares, [*more, Put(key, wire.encode_json(owner))])
        if result.succeeded:
            return result.revision
        leader = await self._etcd.get(keys.LEADER)
        if leader is None or leader.create_revision != self.epoch:
            raise Fenced("Another controller leads.", hint="This one stands by.", epoch=self.epoch)
        return None

    async def _mark(self, decision: MarkNode) -> None:
        await self._fleet.put_node(decision.node_id, leader=self.epoch, state=decision.state, reason=decision.reason)
        severity = "info" if decision.state in ("ready", "draining", "cordoned") else "warning"
        text = f"Node {decision.node_id} is {decision.state}. {decision.reason}"
        await self._chronicle.tell(self.epoch, "node_state", text, subject=decision.node_id, severity=severity)

    async def _reassign(self, decision: ReassignGroups) -> None:
        # The failed epoch itself loses its groups too, hence the bound just above it.
        done = await self._ledger.reassign(decision.run_id, decision.worker, decision.epoch + 1, leader=self.epoch)
        await self._chronicle.count_groups(self.epoch, decision, len(done.groups), done.tokens_kept)


def _wall(known: Known, world: World, moment_s: float) -> dt.datetime:
    """A moment of the world's monotonic clock as wall time, for the record."""
    return known.read_at - dt.timedelta(seconds=max(world.now_s - moment_s, 0.0))
