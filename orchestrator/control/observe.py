"""Put together what is known now: etcd's keys, the signs in memory and the database's records become one `World`."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, field

from orchestrator.control.probe import Probes
from orchestrator.control.records import FailureRow, IncidentRow, Known, NodeRow, RunRow
from orchestrator.control.signals import OwnerFact, Part, RunFact, Signals
from orchestrator.core.world import (
    Exit,
    Lease,
    Node,
    OpenIncident,
    Owner,
    PastFailure,
    Progress,
    Run,
    Status,
    Store,
    Worker,
    World,
    worker_names,
)
from whimbrel import wire
from whimbrel.clock import Clock
from whimbrel.coordination import KeyValue, PrefixView, keys
from whimbrel.limits import STORE_HOLD_S
from whimbrel.wire.cluster import Head, NodeRecord, Ownership, WorkerRecord


@dataclass
class Registry:
    """etcd's keys, decoded: who is registered, who owns what, where the heads are."""

    nodes: dict[str, NodeRecord] = field(default_factory=dict)
    workers: dict[Part, WorkerRecord] = field(default_factory=dict)
    owners: dict[Part, tuple[Ownership, int]] = field(default_factory=dict)
    """With the fencing epoch: the key's mod_revision."""
    heads: dict[str, Head] = field(default_factory=dict)

    @classmethod
    def read(cls, items: dict[str, KeyValue]) -> Registry:
        """Decode all keys. Raises Corrupt when one was written by something else."""
        registry = cls()
        for key, item in items.items():
            if key.startswith(keys.NODES):
                registry.nodes[key.removeprefix(keys.NODES)] = wire.decode_json(item.value, NodeRecord)
            elif key.startswith(keys.WORKERS):
                record = wire.decode_json(item.value, WorkerRecord)
                registry.workers[record.run_id, record.worker] = record
            elif key.startswith(keys.OWNERS):
                owner = wire.decode_json(item.value, Ownership)
                registry.owners[owner.run_id, owner.worker] = (owner, item.mod_revision)
            elif key.startswith(keys.HEADS):
                registry.heads[key.removeprefix(keys.HEADS)] = wire.decode_json(item.value, Head)
        return registry


class Observer:
    """Remembers since when each thing is as it is; that is all it remembers."""

    def __init__(self, view: PrefixView, signals: Signals, probes: Probes, clock: Clock) -> None:
        self.registry = Registry()
        self.store = Store(reachable=False, since_s=clock.monotonic())
        self.leading_since_s = clock.monotonic()
        self._view = view
        self._signals = signals
        self._probes = probes
        self._clock = clock
        self._leases: dict[str, Lease] = {}
        self._owned_since: dict[Part, tuple[int, float]] = {}

    def begin_term(self) -> None:
        """A new term of leadership: silence counts from now."""
        self.leading_since_s = self._clock.monotonic()
        self._leases.clear()
        self._owned_since.clear()
        self._probes.forget()

    def look_at_store(self, reason: str = "") -> Store:
        """Note whether etcd answers, and since when. After an outage, membership is held for a while."""
        now_s, reachable = self._clock.monotonic(), self._view.healthy
        if reachable != self.store.reachable:
            hold_until_s = now_s + STORE_HOLD_S if reachable and self._view.losses else 0.0
            self.store = Store(reachable, now_s, hold_until_s, reason)
        return self.store

    def observe(self, known: Known) -> World:
        """Make the world of this moment, and tell the work API what it must know of it."""
        now_s = self._clock.monotonic()
        store = self.look_at_store()
        if store.reachable:
            self.registry = Registry.read(self._view.items)
        nodes = tuple(self._node(row, now_s) for row in self._node_rows(known))
        runs = tuple(self._run(row, known, now_s) for row in known.runs)
        cluster_wide = tuple(self._open(row, now_s, known.read_at) for row in known.open_incidents if not row.run_id)
        self._tell_signals(known)
        return World(now_s, store, nodes, runs, cluster_wide, self.leading_since_s)

    # -- nodes ------------------------------------------------------------------------------------------------------

    def _node_rows(self, known: Known) -> list[NodeRow]:
        rows = {row.node_id: row for row in known.nodes}
        for node_id in self.registry.nodes:
            rows.setdefault(node_id, NodeRow(node_id=node_id, state="ready", slots=0, cordoned=False, draining=False))
        return [rows[node_id] for node_id in sorted(rows)]

    def _node(self, row: NodeRow, now_s: float) -> Node:
        record = self.registry.nodes.get(row.node_id)
        incarnation = record.incarnation if record is not None else ""
        signs = self._signals.agents.get(row.node_id)
        return Node(
            node_id=row.node_id,
            state=row.state,
            lease=self._lease(keys.node(row.node_id), incarnation, record is not None, now_s),
            slots=record.resources.slots if record is not None else row.slots,
            incarnation=signs.report.incarnation if signs is not None else incarnation,
            registered=incarnation,
            recorded=row.incarnation,
            reported_at_s=signs.received_at_s if signs is not None else None,
            incarnation_since_s=signs.incarnation_since_s if signs is not None else None,
            probe=self._probes.results.get(row.node_id),
            cordoned=row.cordoned,
            draining=row.draining or (record is not None and record.draining),
        )

    def _lease(self, key: str, identity: str, present: bool, now_s: float) -> Lease:
        """Since when the key is there, or gone. A vanished registration keeps its time whatever its identity was."""
        before = self._leases.get(key)
        if before is None:
            lease = Lease(present, now_s, seen=present)
        elif before.present != present:
            lease = Lease(present, now_s, seen=before.seen or present)
        else:
            lease = before
        self._leases[key] = lease
        return lease

    # -- runs -------------------------------------------------------------------------------------------------------

    def _run(self, row: RunRow, known: Known, now_s: float) -> Run:
        head = self.registry.heads.get(row.run_id)
        rollouts = row.spec.roles.rollout.count
        past = [one for one in known.failures if one.run_id == row.run_id]
        workers = tuple(
            self._worker(row.run_id, name, past, known.read_at, now_s) for name, _role in worker_names(rollouts)
        )
        return Run(
            run_id=row.run_id,
            name=row.name,
            desired=row.desired,
            state=row.state,
            generation=row.generation,
            max_steps=row.spec.max_steps,
            rollouts=rollouts,
            max_staleness=row.spec.staleness.max_versions,
            reason=row.reason,
            observed_generation=row.observed_generation,
            head_version=head.version if head is not None else row.head_version,
            mirrored_version=row.mirrored_version,
            workers=workers,
            incidents=tuple(
                self._open(one, now_s, known.read_at) for one in known.open_incidents if one.run_id == row.run_id
            ),
        )

    def _worker(self, run_id: str, name: str, past: list[FailureRow], read_at: dt.datetime, now_s: float) -> Worker:
        part = (run_id, name)
        role = "trainer" if name == "trainer" else "rollout"
        failures = tuple(
            PastFailure(
                _moment(one.at, read_at, now_s),
                one.kind,
                one.node_id,
                one.epoch,
                one.charged,
                one.fingerprint,
            )
            for one in past
            if one.worker == name
        )
        found = self.registry.owners.get(part)
        if found is None:
            return Worker(name, role, failures=failures)
        ownership, epoch = found
        owner = Owner(
            ownership.node_id,
            epoch,
            ownership.state == "running",
            self._since(part, epoch, now_s),
            ownership.start,
            ownership.reason,
        )
        progress = self._progress(part, epoch)
        record = self.registry.workers.get(part)
        present = record is not None and record.epoch == epoch
        lease = self._lease(f"{keys.worker(run_id, name)}@{epoch}", str(epoch), present, now_s)
        return Worker(
            name=name,
            role=role,
            owner=owner,
            lease=lease,
            status=self._status(part, owner),
            progress=progress,
            alive_on=self._alive_on(part),
            slowest_s=dict(self._signals.slowest_s.get((run_id, role), {})),
            failures=failures,
        )

    def _since(self, part: Part, epoch: int, now_s: float) -> float:
        before = self._owned_since.get(part)
        if before is None or before[0] != epoch:
            before = (epoch, now_s)
            self._owned_since[part] = before
            stale = [key for key in self._leases if key.startswith(keys.worker(*part) + "@")]
            for key in stale:
                del self._leases[key]
        return before[1]

    def _progress(self, part: Part, epoch: int) -> Progress | None:
        signs = self._signals.workers.get(part)
        if signs is None or signs.progress.caller.epoch != epoch:
            return None
        return Progress(signs.progress.phase, signs.received_at_s, signs.changed_at_s, signs.progress.policy_version)

    def _status(self, part: Part, owner: Owner) -> Status | None:
        signs = self._signals.agents.get(owner.node_id)
        if signs is None:
            return None
        for status in signs.report.workers:
            if (status.run_id, status.worker) == part and status.epoch == owner.epoch:
                ended = status.exit
                exit_ = Exit(ended.code, ended.signal, ended.cause) if ended is not None else None
                since_s = signs.since_s[status.run_id, status.worker, status.epoch][1]
                return Status(status.state, signs.received_at_s, exit_, since_s)
        return None

    def _alive_on(self, part: Part) -> tuple[str, ...]:
        return tuple(
            node_id
            for node_id, signs in sorted(self._signals.agents.items())
            if any((one.run_id, one.worker) == part and one.state != "exited" for one in signs.report.workers)
        )

    def _open(self, row: IncidentRow, now_s: float, read_at: dt.datetime) -> OpenIncident:
        return OpenIncident(
            incident_id=row.incident_id,
            kind=row.kind,
            opened_s=_moment(row.detected_at, read_at, now_s),
            worker=row.worker,
            node_id=row.node_id,
            epoch=row.epoch,
            decided=row.decided_at is not None,
            groups_reassigned=row.groups_reassigned,
        )

    def _tell_signals(self, known: Known) -> None:
        owners = {
            part: OwnerFact(owner.node_id, epoch, owner.state == "running")
            for part, (owner, epoch) in self.registry.owners.items()
        }
        runs = {
            row.run_id: RunFact(
                row.state,
                row.desired,
                self.registry.heads[row.run_id].version if row.run_id in self.registry.heads else row.head_version,
            )
            for row in known.runs
        }
        addresses = {row.node_id: row.address for row in known.nodes if row.address}
        addresses |= {node_id: record.address for node_id, record in self.registry.nodes.items()}
        self._signals.learn(owners, runs, addresses)


def _moment(wall: dt.datetime, read_at: dt.datetime, now_s: float) -> float:
    """A recorded wall time on this process's monotonic clock. Good for ages within one window, not for leases."""
    return now_s - max((read_at - wall).total_seconds(), 0.0)
