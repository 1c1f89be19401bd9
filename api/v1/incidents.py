"""`/v1/incidents`: what failed, what was decided, what it cost."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request

from api.v1 import models
from api.v1.pages import DEFAULT_LIMIT, Cursor, Limit, decode_cursor, encode_cursor
from api.v1.reads import present_incidents, services_of

router = APIRouter(prefix="/v1/incidents", tags=["incidents"])


@router.get("")
async def list_incidents(
    request: Request,
    run: Annotated[str, Query(max_length=80, description="Only of this run (id or name).")] = "",
    open: Annotated[bool | None, Query(description="Only open ones, or only closed ones.")] = None,  # noqa: A002 - the query's name
    limit: Limit = DEFAULT_LIMIT,
    cursor: Cursor = "",
) -> models.Page[models.Incident]:
    """Incidents, newest first."""
    services = services_of(request)
    run_id = (await services.runs.resolve(run)).id if run else None
    rows = await services.incidents.list(run_id=run_id, open=open, limit=limit + 1, before=decode_cursor(cursor))
    more = encode_cursor(rows[limit - 1].id) if len(rows) > limit else None
    return models.Page[models.Incident](items=await present_incidents(services, rows[:limit]), next_cursor=more)


@router.get("/{incident}")
async def get_incident(
    request: Request, incident: Annotated[str, Path(max_length=80, description="The incident's id.")]
) -> models.Incident:
    """One incident, with its decisions and its cost."""
    services = services_of(request)
    return (await present_incidents(services, [await services.incidents.get(incident)]))[0]
