"""`/v1/events`: history as pages, and as a stream that resumes by id."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import StreamingResponse

from api.v1 import models
from api.v1.pages import DEFAULT_LIMIT, Limit
from api.v1.reads import events_after, present_events, services_of
from api.v1.runs import RunRef
from api.v1.sse import MEDIA_TYPE, EventTail
from whimbrel.errors import UsageError

router = APIRouter(tags=["events"])

After = Annotated[int | None, Query(ge=0, lt=2**53, description="Only events with a greater id.")]
LastEventId = Annotated[str, Header(max_length=20, description="As `after`; what browsers send on reconnecting.")]
_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"content": {MEDIA_TYPE: {"schema": {"type": "string"}}}, "description": "A page, or a stream."}
}


@router.get("/v1/events", response_model=models.Events, responses=_STREAM)
async def list_events(
    request: Request,
    after: After = None,
    run: Annotated[str, Query(max_length=80, description="Only of this run (id or name).")] = "",
    limit: Limit = DEFAULT_LIMIT,
    last_event_id: LastEventId = "",
) -> Response | models.Events:
    """Events in order of their ids; without `after` the newest ones.

    With `Accept: text/event-stream` the answer is a stream: events after `after` (or Last-Event-ID), then new ones as
    they happen, with a comment at least every ten seconds.
    """
    services = services_of(request)
    run_id = (await services.runs.resolve(run)).id if run else None
    if MEDIA_TYPE not in request.headers.get("accept", ""):
        return await _page(request, after, limit, run_id)
    start = _resume_point(last_event_id, after)

    async def read(since: int, count: int) -> tuple[list[models.Event], int]:
        return await events_after(services, since, count, run_id)

    tail: EventTail = request.app.state.event_tail
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(await tail.open(start, read), media_type=MEDIA_TYPE, headers=headers)


@router.get("/v1/runs/{run}/events")
async def list_run_events(
    request: Request, run: RunRef, after: After = None, limit: Limit = DEFAULT_LIMIT
) -> models.Events:
    """Events of one run in order of their ids; without `after` the newest ones."""
    row = await services_of(request).runs.resolve(run)
    return await _page(request, after, limit, row.id)


async def _page(request: Request, after: int | None, limit: int, run_id: str | None) -> models.Events:
    services = services_of(request)
    if after is not None:
        events, upto = await events_after(services, after, limit, run_id)
        return models.Events(items=events, next_after=upto)
    newest = await services.events.last_id()
    rows = await services.events.latest(run_id=run_id, limit=limit)
    events = await present_events(services, rows[::-1])
    return models.Events(items=events, next_after=max(newest, events[-1].id if events else 0))


def _resume_point(last_event_id: str, after: int | None) -> int | None:
    """Last-Event-ID wins: a browser repeats the first URL, `after` included, when it reconnects."""
    if not last_event_id:
        return after
    if not last_event_id.isdecimal():
        raise UsageError(f"Last-Event-ID {last_event_id} is no event id.", hint="Send the last id that was received.")
    return int(last_event_id)
