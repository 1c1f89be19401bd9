"""A made-up cluster for looking at: three nodes, a run of 60 versions with two incidents, and runs in other states.

Everything follows from `Fleet(now)` alone, in the shapes that the REST API answers.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from tests.dashboard.shapes import LOG, RUN, Json, make_node, make_run, other_runs
from whimbrel.clock import rfc3339

FULL_BYTES = 269_030_144
STEP_S = 8.0
WORKERS = (("trainer", "trainer", "node-1"), ("rollout-0", "rollout", "node-2"), ("rollout-1", "rollout", "node-3"))
CRASH_AT, LOSS_AT = 23, 44
"""Versions after which the trainer is killed and node-3 goes away."""


@dataclass
class Fleet:
    """`now` is where the story ends; `commit` and `fail` go on with it."""

    now: datetime
    versions: list[Json] = field(default_factory=list)
    lanes: dict[str, list[Json]] = field(default_factory=dict)
    incidents: list[Json] = field(default_factory=list)
    events: list[Json] = field(default_factory=list)
    nodes: list[Json] = field(default_factory=list)
    runs: list[Json] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(7)
        self._story()
        self.nodes = [make_node(index, self.began, self.now) for index in (1, 2, 3)]
        self.runs = [make_run(self.began, RUN, "sums-135m", "running", ""), *other_runs(self.began, self.now)]
        self._refresh(self.runs[0])

    def commit(self) -> Json:
        """One more version, and the event that tells of it."""
        self.now = max(self.now + timedelta(seconds=0.2), datetime.now(UTC))
        self._version(len(self.versions), self.now)
        self._refresh(self.runs[0])
        return self.tell("version_committed", "info", f"Version {self.versions[-1]['version']} is committed.")

    def tell(self, kind: str, severity: str, message: str, at: datetime | None = None) -> Json:
        event = {
            "id": len(self.events) + 1,
            "at": rfc3339(at or self.now),
            "run_id": RUN,
            "run_name": "sums-135m",
            "kind": kind,
            "severity": severity,
            "subject": "sums-135m",
            "message": message,
            "details": {},
        }
        self.events.append(event)
        return event

    def _story(self) -> None:
        """Backwards from now: when each version was committed, with a pause for each incident."""
        pauses = {CRASH_AT: 22.6, LOSS_AT: 6.0}
        total = sum(pauses.values()) + 61 * STEP_S + 20
        self.began = self.now - timedelta(seconds=total)
        at = self.began
        self.tell("run_created", "info", "Run sums-135m was created: 80 steps.", at)
        for worker, _, node in WORKERS:
            self._span(worker, "pending", "", "", at, 1.5)
            self._span(worker, "starting", "starting", node, at + timedelta(seconds=1.5), 9.5)
            self._span(worker, "starting", "restoring", node, at + timedelta(seconds=11), 6.0)
        at += timedelta(seconds=17)
        self.tell("run_state", "info", "Run sums-135m is running.", at)
        for version in range(61):
            if version:
                self._work(at)
            at += timedelta(seconds=STEP_S)
            self._version(version, at)
            if version == CRASH_AT:
                at = self._crash(at)
            elif version == LOSS_AT:
                at = self._loss(at)
        for worker, _, _ in WORKERS:
            self.lanes[worker][-1]["ended_at"] = None

    def _work(self, at: datetime) -> None:
        node_of = {worker: self.lanes[worker][-1]["node"] for worker, _, _ in WORKERS}
        wait = self._random.uniform(0.4, 1.8)
        self._span("trainer", "running", "waiting", node_of["trainer"], at, wait)
        self._span(
            "trainer", "running", "working", node_of["trainer"], at + timedelta(seconds=wait), STEP_S - wait - 0.9
        )
        self._span("trainer", "running", "publishing", node_of["trainer"], at + timedelta(seconds=STEP_S - 0.9), 0.9)
        for worker in ("rollout-0", "rollout-1"):
            if node_of[worker] == "":
                continue
            apply = self._random.uniform(0.3, 0.9)
            self._span(worker, "running", "applying", node_of[worker], at, apply)
            idle = self._random.choice([0.0, 0.0, 1.2])
            self._span(
                worker, "running", "working", node_of[worker], at + timedelta(seconds=apply), STEP_S - apply - idle
            )
            if idle:
                self._span(worker, "running", "waiting", node_of[worker], at + timedelta(seconds=STEP_S - idle), idle)

    def _crash(self, at: datetime) -> datetime:
        moments = [at + timedelta(seconds=after) for after in (0.4, 1.6, 2.1, 22.6)]
        self._span("trainer", "exited", "working", "node-1", at + timedelta(seconds=0.4), 1.7)
        self._span("trainer", "starting", "starting", "node-1", at + timedelta(seconds=2.1), 7.5)
        self._span("trainer", "starting", "restoring", "node-1", at + timedelta(seconds=9.6), 13.0)
        for worker, node in (("rollout-0", "node-2"), ("rollout-1", "node-3")):
            self._span(worker, "running", "working", node, at, 13.0)
            self._span(worker, "running", "waiting", node, at + timedelta(seconds=13), 9.6)
        self._incident(
            "incident_trainer",
            "worker_exit",
            "trainer",
            "trainer",
            "node-1",
            moments,
            "trainer was ended by SIGKILL; it does its part again on node-1. 3 steps were replayed.",
            "The process was killed from outside (SIGKILL); the kernel counted no kill for lack of memory.",
            [
                ("restart", "node-1 is ready and holds the chunks of the newest version."),
                ("closed", "The trainer committed version 24."),
            ],
            {"steps_lost": 0, "replayed_steps": 3, "groups_reassigned": 0, "tokens_wasted": 0},
        )
        return moments[-1]

    def _loss(self, at: datetime) -> datetime:
        moments = [at + timedelta(seconds=after) for after in (1.0, 11.2, 12.0, 41.0)]
        end = at + timedelta(seconds=6)
        self._span("trainer", "running", "waiting", "node-1", at, 6.0)
        self._span("rollout-0", "running", "working", "node-2", at, 6.0)
        self._span("rollout-1", "running", "working", "node-3", at, 1.0)
        self._span("rollout-1", "unreachable", "working", "node-3", moments[0], 11.0)
        self._span("rollout-1", "starting", "starting", "node-2", moments[2], 12.0)
        self._span("rollout-1", "starting", "restoring", "node-2", at + timedelta(seconds=24), 17.0)
        self._blank_until = moments[3]
        self._incident(
            "incident_node",
            "node_lost",
            "node-3",
            "rollout-1",
            "node-3",
            moments,
            "node-3 went away with rollout-1; it does its part again on node-2. 9 prompt groups went on elsewhere.",
            "Its lease is gone, and neither its agent nor its chunk server answers.",
            [
                ("wait", "One lease is gone; asking the node directly first."),
                ("move", "node-2 has 3 free slots and the newest version."),
            ],
            {"steps_lost": 0, "replayed_steps": 0, "groups_reassigned": 9, "tokens_wasted": 118},
        )
        return end

    def _span(self, worker: str, state: str, phase: str, node: str, at: datetime, seconds: float) -> None:
        blank = getattr(self, "_blank_until", None)
        if worker == "rollout-1" and state == "running" and blank is not None and at < blank:
            return
        lane = self.lanes.setdefault(worker, [])
        lane.append(
            {
                "state": state,
                "phase": phase,
                "node": node,
                "epoch": 812 + len(lane) // 40,
                "started_at": rfc3339(at),
                "ended_at": rfc3339(at + timedelta(seconds=seconds)),
            }
        )

    def _version(self, version: int, at: datetime) -> None:
        rng = self._random
        reward = 0.28 + 0.62 * (1 - math.exp(-version / 22)) + rng.gauss(0, 0.018)
        density = 0.0105 + 0.004 * math.exp(-version / 15) + rng.gauss(0, 0.0006)
        metrics = (
            {}
            if version == 0
            else {
                "reward/mean": reward,
                "reward/p10": max(0.0, reward - 0.3 + 0.1 * version / 60),
                "reward/p90": min(1.0, reward + 0.28),
                "staleness/mean": rng.uniform(0.8, 1.6),
                "staleness/max": float(rng.choice([2, 2, 3, 4])),
                "time/step": rng.uniform(4.9, 6.2),
                "time/wait_for_batch": rng.uniform(0.4, 1.8) + (5 if version == LOSS_AT + 1 else 0),
                "perf/tokens_per_s": rng.gauss(2210, 90) * (0.6 if LOSS_AT < version < LOSS_AT + 5 else 1),
                "sync/encode_ms": rng.uniform(310, 420),
                "sync/publish_ms": rng.uniform(60, 130),
                "sync/payload_bytes": density * FULL_BYTES * 0.74,
                "sync/density": density,
                "entropy/mean": 1.1,
            }
        )
        payload = int(metrics.get("sync/payload_bytes", FULL_BYTES))
        self.versions.append(
            {
                "run_id": RUN,
                "version": version,
                "kind": "delta" if version else "anchor",
                "manifest": f"{rng.getrandbits(128):032x}",
                "parent": self.versions[-1]["manifest"] if self.versions else "",
                "payload_bytes": payload,
                "full_bytes": FULL_BYTES,
                "changed": int(134_515_008 * (density if version else 1)),
                "total": 134_515_008,
                "density": density if version else 1.0,
                "snapshot": "5f" * 16 if version % 20 == 0 else "",
                "anchor": "a1" * 16 if version % 40 == 0 else "",
                "state_digest": f"{rng.getrandbits(64):016x}",
                "metrics": metrics,
                "committed_at": rfc3339(at),
            }
        )

    def _incident(
        self,
        ref: str,
        kind: str,
        subject: str,
        worker: str,
        node: str,
        moments: list[datetime],
        message: str,
        cause: str,
        decisions: list[tuple[str, str]],
        cost: Json,
    ) -> None:
        failed, detected, decided, recovered = moments
        self.incidents.append(
            {
                "id": ref,
                "run_id": RUN,
                "run_name": "sums-135m",
                "kind": kind,
                "subject": subject,
                "severity": "warning",
                "worker": worker,
                "node": node,
                "message": message,
                "cause": cause,
                "decision": ": ".join(decisions[-1]),
                "decisions": [
                    {"at": rfc3339(at), "decision": one, "reason": reason}
                    for at, (one, reason) in zip((decided, recovered), decisions, strict=True)
                ],
                "failed_at": rfc3339(failed),
                "detected_at": rfc3339(detected),
                "decided_at": rfc3339(decided),
                "recovered_at": rfc3339(recovered),
                "open": False,
                "seconds": {
                    "detect": (detected - failed).total_seconds(),
                    "decide": (decided - detected).total_seconds(),
                    "recover": (recovered - decided).total_seconds(),
                    "total": (recovered - failed).total_seconds(),
                },
                "cost": cost,
                "details": {"signal": "SIGKILL", "epoch": 812},
                "log_tail": LOG[-900:],
            }
        )
        self.tell("incident_opened", "warning", cause, detected)
        self.tell("incident_closed", "info", message, recovered)

    def _refresh(self, run: Json) -> None:
        newest = self.versions[-1]
        run["status"] |= {"head_version": newest["version"], "reward": newest["metrics"]["reward/mean"]}

    def workers(self) -> list[Json]:
        return [
            {
                "run_id": RUN,
                "worker": worker,
                "role": role,
                "node": self.lanes[worker][-1]["node"],
                "state": "running",
                "reason": "",
                "epoch": 831,
                "start": 1 if worker == "rollout-0" else 2,
                "policy_version": len(self.versions) - 1,
                "phase": "working",
                "phase_age_s": 2.4,
                "restarts": 0 if worker == "rollout-0" else 1,
                "note": "",
                "exit": None,
                "counters": {},
                "gauges": {"tokens_per_s": 1107.0} if role == "rollout" else {},
                "started_at": rfc3339(self.began),
                "updated_at": rfc3339(self.now),
            }
            for worker, role, _ in WORKERS
        ]
