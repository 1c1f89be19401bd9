"""Incidents: failures from detection to recovery."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from orchestrator.db.session import Database
from orchestrator.db.tables import Incident
from whimbrel.clock import Clock, SystemClock, rfc3339
from whimbrel.errors import NotFound
from whimbrel.ids import new_id
from whimbrel.limits import PAGE_DEFAULT


class IncidentRepository:
    """Rows of `incidents`. Every change can be made again without harm."""

    def __init__(self, database: Database, clock: Clock | None = None) -> None:
        self._database = database
        self._clock = clock or SystemClock()

    async def open(
        self,
        *,
        run_id: str | None,
        kind: str,
        subject: str,
        summary: str,
        incident_id: str | None = None,
        detected_at: datetime | None = None,
        details: dict[str, Any] | None = None,
        leader: int | None = None,
        **columns: Any,
    ) -> Incident:
        """Record a failure. Further columns: worker, node_id, epoch, severity, cause, failed_at, log_tail, ...

        An `incident_id` that exists already is returned as it is.
        """
        async with self._database.write(leader) as session:
            known = await session.get(Incident, incident_id) if incident_id else None
            if known is not None:
                return known
            incident = Incident(
                id=incident_id or new_id("incident"),
                run_id=run_id,
                kind=kind,
                subject=subject,
                summary=summary,
                detected_at=detected_at or self._clock.wall(),
                details=details or {},
                **columns,
            )
            session.add(incident)
        return incident

    async def update(self, incident_id: str, *, leader: int | None = None, **columns: Any) -> None:
        """Set columns of an incident. Raises NotFound."""
        async with self._database.write(leader) as session:
            incident = await _locked(session, incident_id)
            for name, value in columns.items():
                assert name in Incident.__table__.columns, f"incidents has no column {name}"
                setattr(incident, name, value)

    async def decide(
        self,
        incident_id: str,
        decision: str,
        reason: str,
        *,
        at: datetime | None = None,
        leader: int | None = None,
    ) -> None:
        """Append a decision; the first one sets `decided_at`. The last decision again changes nothing."""
        at = at or self._clock.wall()
        async with self._database.write(leader) as session:
            incident = await _locked(session, incident_id)
            last = incident.decisions[-1] if incident.decisions else {}
            if (last.get("decision"), last.get("reason")) == (decision, reason):
                return
            incident.decisions = [*incident.decisions, {"at": rfc3339(at), "decision": decision, "reason": reason}]
            incident.decided_at = incident.decided_at or at

    async def close(
        self,
        incident_id: str,
        *,
        recovered_at: datetime | None = None,
        cost: dict[str, Any] | None = None,
        summary: str | None = None,
        leader: int | None = None,
    ) -> None:
        """End an incident and merge its cost. A closed one stays as it is. Raises NotFound."""
        async with self._database.write(leader) as session:
            incident = await _locked(session, incident_id)
            if incident.state == "closed":
                return
            incident.state = "closed"
            incident.recovered_at = recovered_at or self._clock.wall()
            incident.cost = {**incident.cost, **(cost or {})}
            if summary is not None:
                incident.summary = summary

    async def get(self, incident_id: str) -> Incident:
        """One incident. Raises NotFound."""
        async with self._database.read() as session:
            incident = await session.get(Incident, incident_id)
        if incident is None:
            raise _no_incident(incident_id)
        return incident

    async def list(
        self,
        *,
        run_id: str | None = None,
        open: bool | None = None,  # noqa: A002  the word of the API
        limit: int = PAGE_DEFAULT,
        before: str | None = None,
    ) -> Sequence[Incident]:
        """Incidents, newest first; `before` is the id of the last one of the previous page."""
        query = select(Incident).order_by(Incident.id.desc()).limit(limit)
        if run_id is not None:
            query = query.where(Incident.run_id == run_id)
        if open is not None:
            query = query.where(Incident.state == ("open" if open else "closed"))
        if before is not None:
            query = query.where(Incident.id < before)
        async with self._database.read() as session:
            return list((await session.execute(query)).scalars())


async def _locked(session: AsyncSession, incident_id: str) -> Incident:
    incident = await session.get(Incident, incident_id, with_for_update=True)
    if incident is None:
        raise _no_incident(incident_id)
    return incident


def _no_incident(incident_id: str) -> NotFound:
    return NotFound(f"There is no incident {incident_id}.", hint="`whimbrel incident ls` lists them.")
