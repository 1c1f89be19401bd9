"""`/v1/runs`: create, look at, and say what is wanted."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Request, Response
from fastapi.responses import JSONResponse

from api.http.idempotency import Answer, answer_once
from api.v1 import models
from api.v1.bodies import read_json_object
from api.v1.pages import DEFAULT_LIMIT, Cursor, Limit, decode_cursor, encode_cursor
from api.v1.reads import present_run, present_runs, services_of
from whimbrel.spec import RunSpec, parse_run_spec

router = APIRouter(prefix="/v1/runs", tags=["runs"])

RunRef = Annotated[str, Path(max_length=80, description="The run's id, or its name (the newest run of that name).")]

_DESIRED = {"start": "running", "stop": "stopped", "pause": "paused", "resume": "running"}
_SPEC_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/RunSpec"}}},
    },
    "parameters": [
        {
            "name": "Idempotency-Key",
            "in": "header",
            "required": False,
            "description": "Same key and body: same answer. Other body: 422.",
            "schema": {"type": "string", "maxLength": 200},
        }
    ],
}


@router.post("", status_code=201, response_model=models.Run, openapi_extra=_SPEC_BODY)
async def create_run(request: Request) -> JSONResponse:
    """Create a run from a spec (the keys of a run file) and start it."""
    services = services_of(request)
    document = await read_json_object(request)
    spec: RunSpec = parse_run_spec(document, source="the body")

    async def make() -> Answer:
        row = await services.runs.create(spec)
        await services.events.append(
            "run_created", f"Run {row.name} was created: {spec.max_steps} steps.", subject=row.name, run_id=row.id
        )
        services.controller.wake()
        run = await present_run(services, row)
        return 201, run.model_dump(mode="json"), {"Location": f"/v1/runs/{row.id}"}

    return await answer_once(request, document, services.runs, make)


@router.get("")
async def list_runs(
    request: Request,
    state: Annotated[str, Query(max_length=20, description="Only runs in this state.")] = "",
    limit: Limit = DEFAULT_LIMIT,
    cursor: Cursor = "",
) -> models.Page[models.Run]:
    """Runs, newest first."""
    services = services_of(request)
    rows = await services.runs.list(state=state or None, limit=limit + 1, before=decode_cursor(cursor))
    more = encode_cursor(rows[limit - 1].id) if len(rows) > limit else None
    return models.Page[models.Run](items=await present_runs(services, rows[:limit]), next_cursor=more)


@router.get("/{run}")
async def get_run(request: Request, run: RunRef) -> models.Run:
    """One run."""
    services = services_of(request)
    return await present_run(services, await services.runs.resolve(run))


@router.post(
    "/{run}/{verb}",
    status_code=202,
    responses={200: {"model": models.Run, "description": "It was wanted so already."}},
)
async def want_run(
    request: Request, response: Response, run: RunRef, verb: Literal["start", "stop", "pause", "resume"]
) -> models.Run:
    """Say what is wanted; it is durable when this answers, and the controller brings it about."""
    services = services_of(request)
    found = await services.runs.resolve(run)
    row, changed = await services.runs.want(found.id, _DESIRED[verb])
    if changed:
        await services.events.append(
            f"run_{verb}_requested", f"Asked to {verb} run {row.name}.", subject=row.name, run_id=row.id
        )
        services.controller.wake()
    response.status_code = 202 if changed else 200
    return await present_run(services, row)
