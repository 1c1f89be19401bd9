"""Queries that the resources need beyond what one repository gives: bounded in number whatever the page's size."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime

from fastapi import Request
from sqlalchemy import select, tuple_

from api.services import Services
from api.v1 import models, present
from api.v1.present import RunFacts
from orchestrator.db import tables
from whimbrel.limits import METRIC_POINTS_MAX


def services_of(request: Request) -> Services:
    """What this controller process is made of."""
    services: Services = request.app.state.services
    return services


async def present_runs(services: Services, rows: Sequence[tables.Run]) -> list[models.Run]:
    """Runs with what their workers, newest versions and open incidents say: three queries for all of them."""
    facts = {row.id: RunFacts() for row in rows}
    heads = [(row.id, row.mirrored_version) for row in rows]
    async with services.database.read() as session:
        workers = select(tables.Worker).where(tables.Worker.run_id.in_(facts))
        for worker in await session.scalars(workers):
            facts[worker.run_id].workers.append(worker)
        incidents = select(tables.Incident).where(tables.Incident.run_id.in_(facts), tables.Incident.state == "open")
        for incident in await session.scalars(incidents):
            assert incident.run_id is not None
            facts[incident.run_id].open_incidents.append(incident)
        versions = select(tables.Version).where(tuple_(tables.Version.run_id, tables.Version.version).in_(heads))
        for version in await session.scalars(versions):
            facts[version.run_id].latest = version
        return [present.run(row, facts[row.id]) for row in rows]


async def present_run(services: Services, row: tables.Run) -> models.Run:
    return (await present_runs(services, [row]))[0]


async def run_names(services: Services, run_ids: Iterable[str | None]) -> dict[str, str]:
    """Names of these runs; those that were deleted are absent."""
    wanted = {run_id for run_id in run_ids if run_id is not None}
    if not wanted:
        return {}
    async with services.database.read() as session:
        found = await session.execute(select(tables.Run.id, tables.Run.name).where(tables.Run.id.in_(wanted)))
        return {row.id: row.name for row in found}


async def present_incidents(services: Services, rows: Sequence[tables.Incident]) -> list[models.Incident]:
    names = await run_names(services, (row.run_id for row in rows))
    return [present.incident(row, names.get(row.run_id or "")) for row in rows]


async def present_events(services: Services, rows: Sequence[tables.Event]) -> list[models.Event]:
    names = await run_names(services, (row.run_id for row in rows))
    return [present.event(row, names.get(row.run_id or "")) for row in rows]


async def events_after(
    services: Services, after: int, limit: int, run_id: str | None
) -> tuple[list[models.Event], int]:
    """At most `limit` events in order, and the id up to which everything was looked at."""
    newest = await services.events.last_id()  # before the events, so that none between the two reads is passed over
    rows = await services.events.after(after, run_id=run_id, limit=limit)
    upto = rows[-1].id if len(rows) == limit else max(after, newest, rows[-1].id if rows else 0)
    return await present_events(services, rows), upto


async def marks_since(
    services: Services, run_id: str, since: datetime | None
) -> tuple[list[models.VersionMark], list[models.IncidentBracket]]:
    """Versions committed and incidents in progress since then, oldest first."""
    version, incident = tables.Version, tables.Incident
    versions = select(version).where(version.run_id == run_id).order_by(version.version.desc())
    incidents = select(incident).where(incident.run_id == run_id).order_by(incident.detected_at.desc())
    if since is not None:
        versions = versions.where(version.committed_at >= since)
        incidents = incidents.where(incident.recovered_at.is_(None) | (incident.recovered_at >= since))
    async with services.database.read() as session:
        marks = [present.version_mark(row) for row in await session.scalars(versions.limit(METRIC_POINTS_MAX))]
        brackets = [present.incident_bracket(row) for row in await session.scalars(incidents.limit(METRIC_POINTS_MAX))]
    return marks[::-1], brackets[::-1]
