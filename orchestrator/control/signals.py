"""What agents and workers say to the leading controller, kept in memory: the newest word of each, and when it came.

Nothing here is needed for correctness. A controller that has just begun knows nothing and learns it within a second or
two; until then silence counts from when it began to listen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from orchestrator.core.world import NO_VERSION, Role
from whimbrel.clock import Clock
from whimbrel.errors import Fenced, Unreachable
from whimbrel.wire.cluster import Leader
from whimbrel.wire.work import AgentReply, AgentReport, Caller, Progress, ProgressReply, WorkerStatus

Part = tuple[str, str]
"""(run id, worker name)."""


@dataclass(frozen=True, slots=True)
class OwnerFact:
    """Who owns a part, as far as the work API must know it."""

    node_id: str
    epoch: int
    running: bool


@dataclass(frozen=True, slots=True)
class RunFact:
    state: str
    desired: str
    head_version: int


@dataclass(slots=True)
class AgentSigns:
    report: AgentReport
    received_at_s: float
    incarnation_since_s: float
    since_s: dict[tuple[str, str, int], tuple[str, float]] = field(default_factory=dict)
    """(run, worker, epoch) to the state reported last and when it was first reported."""


@dataclass(frozen=True, slots=True)
class ProgressSigns:
    progress: Progress
    received_at_s: float
    changed_at_s: float


class Signals:
    """The newest signs. Filled by the work API, read by the loop; used in one event loop."""

    def __init__(self, clock: Clock, wake: Callable[[], None]) -> None:
        self.agents: dict[str, AgentSigns] = {}
        self.workers: dict[Part, ProgressSigns] = {}
        self.slowest_s: dict[tuple[str, Role], dict[str, float]] = {}
        self.changed: set[Part] = set()
        """Parts whose progress is newer than the database's copy."""
        self.leader: Leader | None = None
        self.serving = False
        self._clock = clock
        self._wake = wake
        self._owners: Mapping[Part, OwnerFact] = {}
        self._runs: Mapping[str, RunFact] = {}
        self._addresses: Mapping[str, str] = {}

    # -- what the loop tells ----------------------------------------------------------------------------------------

    def learn(
        self, owners: Mapping[Part, OwnerFact], runs: Mapping[str, RunFact], addresses: Mapping[str, str]
    ) -> None:
        """Take over what the loop has just observed; from then on calls are answered by it."""
        self._owners, self._runs, self._addresses = owners, runs, addresses
        known = set(owners)
        self.workers = {part: signs for part, signs in self.workers.items() if part in known}
        self.slowest_s = {key: slowest for key, slowest in self.slowest_s.items() if key[0] in runs}
        self.agents = {node_id: signs for node_id, signs in self.agents.items() if node_id in addresses}

    # -- what the work API asks -------------------------------------------------------------------------------------

    def check_caller(self, caller: Caller) -> None:
        """Refuse a worker that was replaced.

        Raises:
            Fenced: a newer epoch of this worker is known.
            Unreachable: this controller does not lead, or has not seen the worker yet.
        """
        self._require_serving()
        owner = self._owners.get((caller.run_id, caller.worker))
        if owner is None:
            # Owner records are never deleted, so this controller has not seen it yet; refusing would kill a healthy worker.
            raise Unreachable(f"{caller.worker} of {caller.run_id} is not known here yet.", hint="Try again.")
        if owner.epoch > caller.epoch:
            raise Fenced(
                f"{caller.worker} of {caller.run_id} was replaced: epoch {caller.epoch} spoke, {owner.epoch} owns it.",
                hint="Stop and write nothing more.",
                epoch=owner.epoch,
            )

    def progress(self, progress: Progress) -> ProgressReply:
        """Take a worker's word on how far it is. Raises as `check_caller`."""
        caller = progress.caller
        self.check_caller(caller)
        now_s = self._clock.monotonic()
        part = (caller.run_id, caller.worker)
        signs = ProgressSigns(progress, now_s, now_s - max(progress.phase_age_s, 0.0))
        before = self.workers.get(part)
        if before is not None and before.progress.caller.epoch > caller.epoch:
            raise Fenced(f"A newer epoch of {caller.worker} has spoken.", hint="Stop and write nothing more.")
        if before is not None and before.progress.caller.epoch == caller.epoch:
            self._learn_pace(part, before, signs)
        self.workers[part] = signs
        self.changed.add(part)
        if before is None or before.progress.phase != progress.phase:
            self._wake()
        run = self._runs.get(caller.run_id)
        if run is None:
            return ProgressReply()
        return ProgressReply(run_state=run.state, paused=run.desired == "paused")

    def agent_report(self, report: AgentReport) -> AgentReply:
        """Take an agent's whole state; the answer names the exits that nothing depends on any more."""
        self._require_serving()
        now_s = self._clock.monotonic()
        before = self.agents.get(report.node_id)
        same = before is not None and before.report.incarnation == report.incarnation
        if before is not None and same and report.sequence < before.report.sequence:
            return AgentReply()
        signs = AgentSigns(report, now_s, before.incarnation_since_s if before is not None and same else now_s)
        known = before.since_s if before is not None and same else {}
        for status in report.workers:
            key = (status.run_id, status.worker, status.epoch)
            old = known.get(key)
            signs.since_s[key] = old if old is not None and old[0] == status.state else (status.state, now_s)
            if old is None or old[0] != status.state:
                self._wake()
        self.agents[report.node_id] = signs
        forget = [status for status in report.workers if status.state == "exited" and self._is_over(status)]
        return AgentReply(forget=[f"{one.run_id}/{one.worker}@{one.epoch}" for one in forget])

    def head_version(self, run_id: str) -> int:
        """The newest committed version that the loop has seen; -1 when there is none."""
        run = self._runs.get(run_id)
        return run.head_version if run is not None else NO_VERSION

    def agent_address(self, node_id: str) -> str | None:
        """host:port of the chunk server of the node's agent."""
        return self._addresses.get(node_id)

    def gauges(self, run_id: str, worker: str) -> Mapping[str, float]:
        """The worker's latest gauges, of whatever epoch spoke last."""
        signs = self.workers.get((run_id, worker))
        return signs.progress.gauges if signs is not None else {}

    def pids(self, node_id: str, run_id: str, worker: str, epoch: int) -> list[int]:
        """The processes of this epoch that the node's agent has reported and that have not ended."""
        signs = self.agents.get(node_id)
        for status in signs.report.workers if signs is not None else ():
            if (status.run_id, status.worker, status.epoch) == (run_id, worker, epoch) and status.state != "exited":
                return list(status.pids)
        return []

    def log_tail(self, run_id: str, worker: str, epoch: int) -> str:
        """The end of the log that an agent sent with the exit of this epoch, or an empty text."""
        for signs in self.agents.values():
            for status in signs.report.workers:
                if (status.run_id, status.worker, status.epoch) == (run_id, worker, epoch) and status.exit is not None:
                    return status.exit.log_tail
        return ""

    # -- inner ------------------------------------------------------------------------------------------------------

    def _require_serving(self) -> None:
        if not self.serving:
            url = self.leader.url if self.leader is not None else ""
            raise Unreachable(
                "This controller does not lead.",
                hint=f"Ask {url}." if url else "A leader is being elected; try again.",
                leader=url,
            )

    def _is_over(self, status: WorkerStatus) -> bool:
        """The exit decides nothing any more: another epoch, or nobody, owns the part."""
        owner = self._owners.get((status.run_id, status.worker))
        return owner is None or owner.epoch > status.epoch

    def _learn_pace(self, part: Part, before: ProgressSigns, now: ProgressSigns) -> None:
        """A change ended a time without change well: that long is healthy for this phase."""
        waited_s = now.changed_at_s - before.changed_at_s
        if waited_s <= 0:
            return
        role: Role = "trainer" if part[1] == "trainer" else "rollout"
        slowest = self.slowest_s.setdefault((part[0], role), {})
        phase = before.progress.phase
        slowest[phase] = max(slowest.get(phase, 0.0), waited_s)
