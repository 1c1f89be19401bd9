"""Faults that a drill injects into a local cluster, and what is measured of each.

Each fault is done to real processes with real signals. It counts as survived only when the controller recorded an
incident for it, every incident is closed again, every worker runs, and a new version was committed afterwards.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, Literal

import psutil

from api.cli.local import LocalCluster
from api.client import Client
from whimbrel.errors import TimedOut, Unreachable, WhimbrelError
from whimbrel.limits import LEADER_LEASE_TTL_S, NODE_LEASE_TTL_S, WORKER_LEASE_TTL_S

Json = dict[str, Any]
Target = Literal["rollout", "trainer", "agent", "node", "controller", "etcd"]

PAUSE_S: Final = 2.0 * max(NODE_LEASE_TTL_S, WORKER_LEASE_TTL_S, LEADER_LEASE_TTL_S)
"""How long a part stays away: longer than every lease, so that a resumed process is a zombie."""
SETTLE_TIMEOUT_S: Final = 240.0
"""A fault that is not over after this has failed; recovery on a busy machine is dominated by imports."""
POLL_S: Final = 0.25


@dataclass(frozen=True)
class Fault:
    """What is done to which part."""

    name: str
    target: Target
    action: Literal["kill", "pause"]


FAULTS: Final = tuple(
    Fault(f"{action} {target}", target, action)
    for action in ("kill", "pause")
    for target in ("rollout", "trainer", "agent", "node", "controller", "etcd")
)
DRILL: Final = tuple(fault for fault in FAULTS if fault.action == "kill" and fault.target not in ("agent", "node"))


@dataclass
class Verdict:
    """What was measured of one fault. Seconds count from the moment of the fault."""

    fault: Fault
    detect_s: float | None = None
    recover_s: float | None = None
    head_before: int = -1
    head_after: int = -1
    lost_steps: int = 0
    replayed_steps: int = 0
    state_digest_equal: bool | None = None
    """Whether a restored trainer reproduced the log's bits; None where no trainer was restored."""
    incidents: list[str] = field(default_factory=list)
    problem: str = ""

    @property
    def survived(self) -> bool:
        return not self.problem and self.lost_steps == 0 and self.state_digest_equal is not False


class Director:
    """Injects faults into one run on one local cluster, one after the other."""

    def __init__(self, cluster: LocalCluster, client: Client, run_id: str, say: Callable[[str], None]) -> None:
        self.cluster = cluster
        self.client = client
        self.run_id = run_id
        self._say = say

    def play(self, faults: Iterable[Fault]) -> list[Verdict]:
        """Inject each fault once the run is healthy again after the one before."""
        return [self._play_one(fault) for fault in faults]

    def _play_one(self, fault: Fault) -> Verdict:
        verdict = Verdict(fault)
        try:
            verdict.head_before = self._wait_healthy(beyond=self._head() + 1)
        except WhimbrelError as error:
            verdict.problem = f"not injected: {error}"
            return verdict
        began = datetime.now(UTC)
        self._say(f"drill: {fault.name}")
        try:
            inject(self.cluster, self.client, self.run_id, fault)
            verdict.head_after = self._wait_healthy(beyond=verdict.head_before, since=began)
        except WhimbrelError as error:
            verdict.problem = str(error)
        self._measure(verdict, began)
        self._say(f"drill: {fault.name}: {describe(verdict)}")
        return verdict

    def _measure(self, verdict: Verdict, began: datetime) -> None:
        incidents = self._incidents(began)
        verdict.incidents = [incident["kind"] for incident in incidents]
        if not incidents:
            verdict.problem = verdict.problem or "no incident was recorded"
            return
        verdict.detect_s = min((_moment(i["detected_at"]) - began).total_seconds() for i in incidents)
        recovered = [i["recovered_at"] for i in incidents if i["recovered_at"]]
        if recovered:
            verdict.recover_s = max((_moment(at) - began).total_seconds() for at in recovered)
        for incident in incidents:
            verdict.replayed_steps += int(incident["cost"].get("replayed_steps") or 0)
            verdict.lost_steps += int(incident["cost"].get("steps_lost") or 0)
        if any(i["worker"] == "trainer" and i["kind"] != "replay_mismatch" for i in incidents):
            verdict.state_digest_equal = "replay_mismatch" not in verdict.incidents
        if 0 <= verdict.head_after < verdict.head_before:
            verdict.lost_steps += verdict.head_before - verdict.head_after

    def _head(self) -> int:
        try:
            return int(self.client.run(self.run_id)["status"]["head_version"])
        except Unreachable:
            return -1

    def _wait_healthy(self, *, beyond: int, since: datetime | None = None) -> int:
        """Wait until the run is running with every worker, no incident open, its head past `beyond`; or completed."""
        deadline = time.monotonic() + SETTLE_TIMEOUT_S
        status: Json = {}
        while time.monotonic() < deadline:
            try:
                status = self.client.run(self.run_id)["status"]
                passed = status["head_version"] > beyond and self._noticed(since)
                if status["state"] == "completed" and status["open_incidents"] == 0 and passed:
                    return int(status["head_version"])  # it recovered and went on to its end between two looks
                if status["state"] in ("failed", "stopped", "completed"):
                    raise WhimbrelError(f"The run is {status['state']}: {status['reason']}")
                if self._is_healthy(status) and passed:
                    return int(status["head_version"])
            except Unreachable:
                pass
            time.sleep(POLL_S)
        raise TimedOut(f"The run was not healthy within {SETTLE_TIMEOUT_S:.0f} s: {status}")

    def _is_healthy(self, status: Json) -> bool:
        everyone = status["workers_running"] == status["workers_total"] > 0
        return status["state"] == "running" and everyone and status["open_incidents"] == 0

    def _noticed(self, since: datetime | None) -> bool:
        """Whether the controller recorded the fault and closed the record; one that nobody saw was not survived."""
        if since is None:
            return True
        incidents = self._incidents(since)
        return bool(incidents) and not any(incident["open"] for incident in incidents)

    def _incidents(self, since: datetime) -> list[Json]:
        """What the controller recorded after `since`, of this run and of the cluster as a whole."""
        found = self.client.incidents(limit=100)
        ours = (incident for incident in found if incident["run_id"] in (None, self.run_id))
        return [incident for incident in ours if _moment(incident["detected_at"]) >= since]


def inject(cluster: LocalCluster, client: Client, run_id: str, fault: Fault) -> None:
    """Do the fault. Pauses and the outage of etcd last PAUSE_S; the call returns when the part is let go again."""
    pids = _victims(cluster, client, run_id, fault.target)
    if fault.action == "pause":
        _signal_all(pids, signal.SIGSTOP)
        time.sleep(PAUSE_S)
        _signal_all(pids, signal.SIGCONT)
    elif fault.target == "etcd":
        cluster.kill("etcd", hold=True)
        time.sleep(PAUSE_S)
        cluster.release("etcd")
    elif fault.target == "controller":
        cluster.kill("controller")
    else:
        _signal_all(pids, signal.SIGKILL)


def worker_pids(home: str, run_id: str, worker: str) -> list[int]:
    """Processes of a worker on this machine, found by the environment that its agent gave it."""
    found = []
    for process in psutil.process_iter(["pid"]):
        try:
            environment = process.environ()
        except (psutil.Error, OSError):
            continue
        ours = environment.get("WHIMBREL_HOME") == home and environment.get("WHIMBREL_RUN_ID") == run_id
        if ours and environment.get("WHIMBREL_WORKER") == worker:
            found.append(process.pid)
    return found


def _victims(cluster: LocalCluster, client: Client, run_id: str, target: Target) -> list[int]:
    if target in ("controller", "etcd"):
        return [cluster.pid(target)]
    workers = client.workers(run_id)
    # The trainer's node is the worst one to lose: its trainer must be restored elsewhere, from the log.
    role = "trainer" if target in ("trainer", "node") else "rollout"
    victim = next(worker for worker in workers if worker["role"] == role)
    node = victim["node"]
    if target in ("rollout", "trainer"):
        pids = worker_pids(str(cluster.home), run_id, victim["worker"])
    else:
        pids = [cluster.pid(node)]
        if target == "node":
            for worker in workers:
                if worker["node"] == node:
                    pids += worker_pids(str(cluster.home), run_id, worker["worker"])
    if not pids:
        raise WhimbrelError(f"There is no process of {target} to hit.")
    return pids


def _signal_all(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:  # a paused process may have been replaced and killed meanwhile: that is the point
            continue


def describe(verdict: Verdict) -> str:
    """One line about a verdict."""
    if verdict.problem:
        return f"NOT SURVIVED: {verdict.problem}"
    return f"detected after {seconds(verdict.detect_s)}, recovered after {seconds(verdict.recover_s)}"


def seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"


def _moment(text: str | None) -> datetime:
    return datetime.fromisoformat(text) if text else datetime.min.replace(tzinfo=UTC)
