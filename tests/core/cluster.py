"""A toy cluster in virtual time: agents, workers, leases and an etcd that can go away; applies plans like the controller."""

from __future__ import annotations

from dataclasses import dataclass, field

from orchestrator.core import decide
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
from orchestrator.core.world import (
    Exit,
    Lease,
    Node,
    OpenIncident,
    Owner,
    PastFailure,
    Probe,
    Progress,
    Run,
    Status,
    Store,
    Worker,
    World,
    worker_names,
)
from whimbrel.limits import NODE_LEASE_TTL_S, STORE_HOLD_S

TICK_S = 0.5
BOOT_S = 3.0


@dataclass
class Process:
    epoch: int
    born_s: float
    state: str = "running"  # running | paused | exited | stuck (in the kernel: no signal ends it)
    exit: Exit | None = None
    ended_s: float = 0.0
    renewed_s: float = 0.0
    heard_s: float = -1.0
    registered: bool = False


@dataclass
class Machine:
    node_id: str
    slots: int
    agent: str = "running"  # running | paused | dead
    incarnation: int = 1
    renewed_s: float = 0.0
    lease: bool = True
    lease_since_s: float = 0.0
    reported_at_s: float | None = None
    incarnation_since_s: float | None = None
    probe: Probe | None = None
    state: str = "ready"
    processes: dict[tuple[str, str], Process] = field(default_factory=dict)
    status: dict[tuple[str, str], tuple[int, Status]] = field(default_factory=dict)


@dataclass
class Job:
    run_id: str
    rollouts: int
    max_steps: int = 10_000
    desired: str = "running"
    state: str = "pending"
    reason: str = ""
    generation: int = 1
    observed: int = 0
    head: int = -1
    owners: dict[str, Owner] = field(default_factory=dict)
    leases: dict[str, Lease] = field(default_factory=dict)
    progress: dict[str, Progress] = field(default_factory=dict)
    failures: list[tuple[str, PastFailure]] = field(default_factory=list)
    open: list[OpenIncident] = field(default_factory=list)
    history: list[str] = field(default_factory=list)


class Cluster:
    """Steps of TICK_S: machines act, then the controller decides and its plan is applied (or cut short)."""

    def __init__(self, nodes: int, jobs: int, *, slots: int = 4, rollouts: int = 2) -> None:
        self.now_s = 100.0
        self.revision = 1
        self.store = Store(reachable=True)
        self.machines = {f"n{index}": Machine(f"n{index}", slots) for index in range(nodes)}
        for machine in self.machines.values():
            machine.renewed_s = machine.lease_since_s = self.now_s
        self.jobs = {f"run_{index}": Job(f"run_{index}", rollouts) for index in range(jobs)}
        self.incidents: list[OpenIncident] = []
        self.applied: list[Decision] = []

    # -- faults ---------------------------------------------------------------------------------------------------------

    def kill_worker(self, run_id: str, name: str, code: int | None = None, cause: str = "") -> None:
        for machine in self.machines.values():
            process = machine.processes.get((run_id, name))
            if process is not None and process.state != "exited":
                process.state, process.ended_s = "exited", self.now_s
                process.exit = Exit(code, "" if code is not None else "SIGKILL", cause)

    def pause_worker(self, run_id: str, name: str, paused: bool = True) -> None:
        for machine in self.machines.values():
            process = machine.processes.get((run_id, name))
            if process is not None and process.state != "exited":
                process.state = "paused" if paused else "running"

    def kill_node(self, node_id: str) -> None:
        machine = self.machines[node_id]
        machine.agent = "dead"
        machine.processes.clear()

    def start_agent(self, node_id: str) -> None:
        machine = self.machines[node_id]
        if machine.agent == "dead":
            machine.incarnation += 1
            machine.status.clear()
            machine.incarnation_since_s = None
        machine.agent = "running"

    def lose_etcd(self) -> None:
        self.store = Store(False, self.now_s, 0.0, "down")

    def return_etcd(self) -> None:
        if not self.store.reachable:
            self.store = Store(True, self.now_s, self.now_s + STORE_HOLD_S)
            for machine in self.machines.values():  # a new etcd leader extends every lease
                machine.renewed_s = self.now_s
                for process in machine.processes.values():
                    process.renewed_s = self.now_s

    # -- time -----------------------------------------------------------------------------------------------------------

    def tick(self, cut: int | None = None) -> Plan:
        self.now_s += TICK_S
        for machine in self.machines.values():
            self._machine(machine)
        for job in self.jobs.values():
            trainer = job.progress.get("trainer")
            if trainer and trainer.received_at_s == self.now_s and trainer.phase == "working" and self.store.reachable:
                job.head = min(job.head + 1, job.max_steps)
                job.progress["trainer"] = Progress("working", self.now_s, self.now_s, job.head)
        plan = decide(self.world())
        for decision in plan.decisions[:cut]:
            self._apply(decision)
        return plan

    def run_for(self, seconds: float) -> None:
        for _ in range(int(seconds / TICK_S)):
            self.tick()

    def _machine(self, machine: Machine) -> None:
        alive = machine.agent == "running"
        if alive and self.store.reachable:
            machine.renewed_s = self.now_s
            self._obey(machine)
        if self.store.reachable:
            self._lease(machine)
        for (run_id, name), process in machine.processes.items():
            self._work(self.jobs[run_id], name, process)
        if alive:
            machine.reported_at_s = self.now_s
            if machine.incarnation_since_s is None:
                machine.incarnation_since_s = self.now_s
            machine.status = {
                key: (
                    one.epoch,
                    Status(
                        "running" if one.state == "stuck" else one.state,
                        self.now_s,
                        one.exit,
                        one.ended_s or one.born_s,
                    ),
                )  # type: ignore[arg-type]
                for key, one in machine.processes.items()
            }

    def _obey(self, machine: Machine) -> None:
        for job in self.jobs.values():
            for name, owner in job.owners.items():
                key = (job.run_id, name)
                process = machine.processes.get(key)
                mine = owner.running and owner.node_id == machine.node_id
                if process is not None and process.epoch < owner.epoch and process.state not in ("exited", "stuck"):
                    process.state, process.ended_s, process.exit = "exited", self.now_s, Exit(None, "SIGKILL")
                if process is not None and process.state == "exited" and process.epoch < owner.epoch:
                    del machine.processes[key]
                    process = None
                # The agent's own record says which epochs it started: it never starts one twice.
                if mine and process is None and owner.since_s >= self.now_s - 2 * TICK_S:
                    machine.processes[key] = Process(owner.epoch, self.now_s, renewed_s=self.now_s)

    def _lease(self, machine: Machine) -> None:
        present = self.now_s - machine.renewed_s <= NODE_LEASE_TTL_S
        if present != machine.lease:
            machine.lease, machine.lease_since_s = present, self.now_s

    def _work(self, job: Job, name: str, process: Process) -> None:
        owner = job.owners.get(name)
        if process.state != "running" or owner is None or owner.epoch != process.epoch:
            return
        if self.now_s - process.born_s < BOOT_S:
            return
        if self.store.reachable:
            process.renewed_s, process.registered = self.now_s, True
        version = max(job.head, 0)
        job.progress[name] = Progress("working", self.now_s, self.now_s, version)

    # -- what the controller sees and does ------------------------------------------------------------------------------

    def world(self) -> World:
        nodes = tuple(self._node(machine) for machine in self.machines.values())
        runs = tuple(self._run(job) for job in self.jobs.values())
        return World(self.now_s, self.store, nodes, runs, tuple(self.incidents))

    def _node(self, machine: Machine) -> Node:
        lease = Lease(machine.lease, machine.lease_since_s)
        return Node(
            machine.node_id,
            machine.state,  # type: ignore[arg-type]
            lease,
            machine.slots,
            str(machine.incarnation),
            machine.reported_at_s,
            machine.incarnation_since_s,
            machine.probe,
        )

    def _run(self, job: Job) -> Run:
        workers: list[Worker] = []
        for name, role in worker_names(job.rollouts):
            owner = job.owners.get(name)
            if owner is None:
                workers.append(Worker(name, role))
                continue
            key = (job.run_id, name)
            status, process = None, None
            if owner.node_id in self.machines:
                machine = self.machines[owner.node_id]
                known = machine.status.get(key)
                status = known[1] if known and known[0] == owner.epoch else None
                process = machine.processes.get(key)
            lease = self._worker_lease(job, name, owner, process)
            progress = job.progress.get(name)
            if progress is not None and progress.received_at_s < owner.since_s:
                progress = None
            alive = tuple(
                machine.node_id
                for machine in self.machines.values()
                if machine.agent == "running" and key in machine.processes and machine.processes[key].state != "exited"
            )
            failures = tuple(past for who, past in job.failures if who == name)
            workers.append(Worker(name, role, owner, lease, status, progress, alive, failures=failures))
        return Run(
            job.run_id,
            job.run_id,
            job.desired,  # type: ignore[arg-type]
            job.state,  # type: ignore[arg-type]
            job.generation,
            job.max_steps,
            job.rollouts,
            4,
            job.reason,
            job.observed,
            job.head,
            job.head,
            tuple(workers),
            tuple(job.open),
        )

    def _worker_lease(self, job: Job, name: str, owner: Owner, process: Process | None) -> Lease:
        before = job.leases.get(name)
        if before is None or before.since_s < owner.since_s:
            before = Lease(False, owner.since_s, seen=False)
        if self.store.reachable:
            alive = process is not None and process.epoch == owner.epoch and process.registered
            present = alive and self.now_s - (process.renewed_s if process else 0) <= NODE_LEASE_TTL_S
            if process is None or process.epoch != owner.epoch:
                # The node died; its worker's lease runs out one TTL after the last progress.
                progress = job.progress.get(name)
                heard_s = progress.received_at_s if progress else 0.0
                present = before.present and self.now_s - heard_s <= NODE_LEASE_TTL_S
            if present != before.present:
                before = Lease(present, self.now_s, seen=before.seen or present)
        job.leases[name] = before
        return before

    def _apply(self, decision: Decision) -> None:
        self.applied.append(decision)
        match decision:
            case StartWorker():
                job = self.jobs[decision.run_id]
                now = job.owners.get(decision.worker)
                assert (now.epoch if now else 0) == decision.replaces_epoch
                self.revision += 1
                start = now.start + 1 if now else 1
                job.owners[decision.worker] = Owner(decision.node_id, self.revision, True, self.now_s, start)
            case StopWorker():
                job = self.jobs[decision.run_id]
                self.revision += 1
                now = job.owners[decision.worker]
                job.owners[decision.worker] = Owner(now.node_id, self.revision, False, self.now_s, now.start)
            case MarkNode():
                self.machines[decision.node_id].state = decision.state
            case SetRunState():
                job = self.jobs[decision.run_id]
                if job.state != decision.state:
                    job.history.append(decision.state)
                job.state, job.reason, job.observed = decision.state, decision.reason, decision.generation
            case RecordIncident():
                self._record(decision)
            case ReassignGroups():
                job = self.jobs[decision.run_id]
                job.open = [
                    self._with(one, groups_reassigned=3) if one.epoch == decision.epoch else one for one in job.open
                ]
            case AdvanceIncident():
                for job in self.jobs.values():
                    job.open = [
                        self._with(one, decided=True) if one.incident_id == decision.incident_id else one
                        for one in job.open
                    ]
            case CloseIncident():
                self.incidents = [one for one in self.incidents if one.incident_id != decision.incident_id]
                for job in self.jobs.values():
                    job.open = [one for one in job.open if one.incident_id != decision.incident_id]
            case RequestProbe():
                machine = self.machines[decision.node_id]
                answered = machine.agent == "running"
                before = machine.probe.failing_since_s if machine.probe else None
                failing = None if answered else (before if before is not None else self.now_s)
                machine.probe = Probe(self.now_s, answered, failing)

    def _record(self, decision: RecordIncident) -> None:
        name = f"inc-{decision.run_id}-{decision.worker}-{decision.epoch}-{len(self.applied)}"
        one = OpenIncident(name, decision.kind, self.now_s, decision.worker, decision.node_id, decision.epoch)
        if not decision.run_id:
            self.incidents.append(one)
            return
        job = self.jobs[decision.run_id]
        job.open.append(one)
        past = PastFailure(
            self.now_s, decision.kind, decision.node_id, decision.epoch, decision.charged, decision.fingerprint
        )
        job.failures.append((decision.worker, past))

    @staticmethod
    def _with(incident: OpenIncident, **changes: object) -> OpenIncident:
        fields = {name: getattr(incident, name) for name in OpenIncident.__dataclass_fields__}
        return OpenIncident(**{**fields, **changes})  # type: ignore[arg-type]

    def healthy(self) -> bool:
        return all(
            job.state == "running"
            and not job.open
            and all(self.machines[owner.node_id].agent == "running" for owner in job.owners.values())
            for job in self.jobs.values()
        )
