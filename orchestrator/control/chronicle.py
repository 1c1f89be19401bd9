"""Write down what happened: run states, incidents and events. All fenced by the leadership epoch, all repeatable."""

from __future__ import annotations

import datetime as dt
from typing import Any

from sqlalchemy import select, update

from orchestrator.control.signals import Signals
from orchestrator.core.decisions import AdvanceIncident, CloseIncident, ReassignGroups, RecordIncident, SetRunState
from orchestrator.core.lifecycle import TERMINAL
from orchestrator.db import Database, EventLog, IncidentRepository, RunRepository, tables
from whimbrel.clock import Clock, rfc3339
from whimbrel.errors import Conflict, NotFound
from whimbrel.ids import new_id
from whimbrel.wire.work import Incident

COST_GAUGES = ("replayed_steps", "restore_s", "snapshot_version")
"""What a trainer's new epoch says of its restore, copied into the incident's cost."""

ADVICE = {
    "user_error": "Correct the model, environment or run file and start the run again.",
    "worker_hang": "If the phase is really that slow, nothing is wrong; the bound adapts to it.",
    "node_lost": "Check the machine; it may join again at any time.",
    "agent_lost": "Check the machine and its agent if it stays away.",
    "store_outage": "Check that etcd runs and can be reached.",
}


class Chronicle:
    """Records of one controller."""

    def __init__(self, database: Database, signals: Signals, clock: Clock, events: EventLog) -> None:
        self._database = database
        self._signals = signals
        self._clock = clock
        self._runs = RunRepository(database, clock)
        self._incidents = IncidentRepository(database, clock)
        self._events = events

    async def tell(
        self,
        epoch: int,
        kind: str,
        message: str,
        *,
        run_id: str | None = None,
        subject: str = "",
        severity: str = "info",
    ) -> None:
        """Append one event."""
        await self._events.append(kind, message, subject=subject, run_id=run_id, severity=severity, leader=epoch)

    async def set_run_state(self, epoch: int, decision: SetRunState) -> None:
        """Record the run's state; a final state is never left."""
        before = await self._runs.get(decision.run_id)
        if before.state in TERMINAL:
            return
        now = self._clock.wall()
        columns: dict[str, Any] = {
            "state": decision.state,
            "reason": decision.reason,
            "observed_generation": decision.generation,
        }
        if before.started_at is None and decision.state not in ("pending", "stopped"):
            columns["started_at"] = now
        if decision.state in TERMINAL:
            columns["finished_at"] = now
        if decision.state == "failed":
            columns["error"] = decision.reason
        try:
            await self._runs.update(decision.run_id, leader=epoch, **columns)
        except (Conflict, NotFound):
            return  # the run ended or was deleted since it was read: nothing to record
        if before.state != decision.state:
            severity = "error" if decision.state == "failed" else "info"
            text = f"Run {before.name} is {decision.state}. {decision.reason}".strip()
            await self.tell(epoch, "run_state", text, run_id=decision.run_id, subject=before.name, severity=severity)

    async def record(self, epoch: int, decision: RecordIncident, failed_at: dt.datetime) -> None:
        """Open an incident, and count the failure against the worker, in one transaction; nothing if it is open already."""
        now = self._clock.wall()
        async with self._database.write(leader=epoch) as session:
            found = await session.scalar(
                select(tables.Incident.id).where(
                    tables.Incident.state == "open",
                    tables.Incident.run_id == (decision.run_id or None),
                    tables.Incident.worker == decision.worker,
                    tables.Incident.node_id == decision.node_id,
                    tables.Incident.epoch == decision.epoch,
                    tables.Incident.kind == decision.kind,
                )
            )
            if found is not None:
                return
            session.add(self._incident(decision, failed_at, now))
            if decision.worker:
                session.add(
                    tables.Restart(
                        run_id=decision.run_id,
                        worker=decision.worker,
                        node_id=decision.node_id,
                        epoch=decision.epoch,
                        kind=decision.kind,
                        at=now,
                        charged=decision.charged,
                        fingerprint=decision.fingerprint,
                    )
                )
            if decision.worker == "trainer":
                # Time without a trainer counts from its last sign of life, not from when that was understood.
                lost_s = max((now - failed_at).total_seconds(), 0.0)
                table = tables.Run
                change = update(table).where(table.id == decision.run_id, table.head_version >= 0)
                await session.execute(change.values(unavailable_s=table.unavailable_s + lost_s))
        await self.tell(
            epoch,
            "incident_opened",
            _explained(decision),
            run_id=decision.run_id or None,
            subject=decision.worker or decision.node_id or "etcd",
            severity="warning",
        )

    def _incident(self, decision: RecordIncident, failed_at: dt.datetime, now: dt.datetime) -> tables.Incident:
        subject = decision.worker or decision.node_id or "etcd"
        log_tail = self._signals.log_tail(decision.run_id, decision.worker, decision.epoch)
        return tables.Incident(
            id=new_id("incident"),
            run_id=decision.run_id or None,
            kind=decision.kind,
            subject=subject,
            worker=decision.worker,
            node_id=decision.node_id,
            epoch=decision.epoch,
            severity="error" if decision.charged else "warning",
            state="open",
            summary=_explained(decision),
            cause=decision.reason,
            failed_at=min(failed_at, now),
            detected_at=now,
            cost={"steps_lost": 0} if decision.worker else {},
            details={"charged": decision.charged},
            log_tail=log_tail,
        )

    async def record_reported(self, epoch: int, incident: Incident) -> None:
        """Record what a worker found and dealt with itself: it opens and closes at once."""
        now, caller = self._clock.wall(), incident.caller
        row = await self._incidents.open(
            run_id=caller.run_id,
            kind=incident.kind,
            subject=caller.worker,
            summary=incident.message,
            worker=caller.worker,
            epoch=caller.epoch,
            severity="warning",
            cause=incident.message,
            failed_at=now,
            detected_at=now,
            details=dict(incident.details),
            leader=epoch,
        )
        await self._incidents.close(row.id, recovered_at=now, leader=epoch)
        await self.tell(
            epoch, incident.kind, incident.message, run_id=caller.run_id, subject=caller.worker, severity="warning"
        )

    async def count_groups(self, epoch: int, decision: ReassignGroups, groups: int, tokens_kept: int) -> None:
        """Note in the incident how many prompt groups went back to the pool."""
        async with self._database.write(leader=epoch) as session:
            incident = await session.scalar(
                select(tables.Incident).where(
                    tables.Incident.state == "open",
                    tables.Incident.run_id == decision.run_id,
                    tables.Incident.worker == decision.worker,
                    tables.Incident.epoch == decision.epoch,
                )
            )
            if incident is not None and "groups_reassigned" not in incident.cost:
                incident.cost = {**incident.cost, "groups_reassigned": groups, "tokens_kept": tokens_kept}

    async def advance(self, epoch: int, decision: AdvanceIncident, decided_at: dt.datetime) -> None:
        """Note which new owner was chosen, and when."""
        await self._incidents.decide(
            decision.incident_id, f"start on {decision.node_id}", decision.reason, at=decided_at, leader=epoch
        )

    async def close(self, epoch: int, decision: CloseIncident, recovered_at: dt.datetime) -> None:
        """Close an incident with what it cost; closing again changes nothing."""
        gauges = self._signals.gauges(decision.run_id, decision.worker)
        async with self._database.write(leader=epoch) as session:
            incident = await session.get(tables.Incident, decision.incident_id)
            if incident is None or incident.state != "open":
                return
            cost = {**incident.cost}
            if incident.worker == "trainer" and incident.decided_at is not None:
                cost |= {name: gauges[name] for name in COST_GAUGES if name in gauges}
            incident.cost = cost
            incident.state = "closed"
            # Clocks are read at different moments: a record never shows an end before its beginning.
            ended_at = max(recovered_at, incident.decided_at or incident.detected_at)
            incident.recovered_at = ended_at
            seconds = (ended_at - (incident.failed_at or incident.detected_at)).total_seconds()
            incident.summary = _summary(incident, decision.reason, seconds)
            done = {"at": rfc3339(ended_at), "decision": "closed", "reason": decision.reason}
            incident.decisions = [*incident.decisions, done]
            if incident.run_id is not None and incident.decided_at is not None:
                table = tables.Run
                change = update(table).where(table.id == incident.run_id)
                await session.execute(change.values(recoveries=table.recoveries + 1))
            summary, run_id, subject = incident.summary, incident.run_id, incident.subject
        await self.tell(epoch, "incident_closed", summary, run_id=run_id, subject=subject)


def _explained(decision: RecordIncident) -> str:
    """What happened and what the user may do: the same words in the incident and in the events."""
    return f"{decision.reason} {ADVICE.get(decision.kind, '')}".strip()


def _summary(incident: tables.Incident, outcome: str, seconds: float) -> str:
    parts = [incident.cause, outcome, f"It took {seconds:.1f} s."]
    replayed = incident.cost.get("replayed_steps")
    if replayed is not None:
        parts.append(f"{int(replayed)} steps were replayed, none that was committed is lost.")
    groups = incident.cost.get("groups_reassigned")
    if groups:
        parts.append(f"{groups} prompt groups went back to the pool.")
    advice = ADVICE.get(incident.kind, "")
    return " ".join(part for part in (*parts, advice) if part)
