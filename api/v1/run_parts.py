"""`/v1/runs/{run}/…`: workers, logs, versions, metrics, timeline, incidents, audit."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request

from api.v1 import models, present
from api.v1.pages import DEFAULT_LIMIT, Cursor, Limit, decode_cursor, decode_number_cursor, encode_cursor
from api.v1.reads import marks_since, present_incidents, services_of
from api.v1.runs import RunRef
from orchestrator.db import tables
from whimbrel.clock import SystemClock
from whimbrel.errors import NotFound, UsageError
from whimbrel.limits import AGENT_CALL_TIMEOUT_S, LOG_TAIL_BYTES, METRIC_POINTS_MAX, TIMELINE_SPANS_MAX
from whimbrel.transport import call_async
from whimbrel.wire import decode_message, encode_message
from whimbrel.wire.node import LogsReply, LogsRequest

router = APIRouter(prefix="/v1/runs/{run}", tags=["runs"])

WorkerName = Annotated[str, Path(max_length=80, description="The worker's name, e.g. trainer.")]


@router.get("/workers")
async def list_workers(request: Request, run: RunRef) -> models.Workers:
    """The run's workers, each at its newest epoch."""
    services = services_of(request)
    row = await services.runs.resolve(run)
    now = SystemClock().wall()
    workers = await services.fleet.workers(row.id)
    order = sorted(workers, key=lambda worker: (worker.role != "trainer", len(worker.name), worker.name))
    return models.Workers(items=[present.worker(worker, now) for worker in order])


@router.get("/workers/{worker}/logs")
async def read_logs(
    request: Request,
    run: RunRef,
    worker: WorkerName,
    tail: Annotated[int, Query(ge=1, le=LOG_TAIL_BYTES, description="Bytes from the end.")] = 16_384,
) -> models.WorkerLog:
    """The end of a worker's log, asked of the agent on its node."""
    services = services_of(request)
    row = await services.runs.resolve(run)
    found = await services.fleet.worker(row.id, worker)
    if not found.node_id:
        raise NotFound(f"{worker} of {row.name} has not been placed on a node yet.", hint="Look at the run's events.")
    address = services.controller.signals.agent_address(found.node_id)
    if not address:
        address = (await services.fleet.node(found.node_id)).address
    question = LogsRequest(run_id=row.id, worker=worker, tail_bytes=tail)
    answer = await call_async(
        address, services.cluster_token, "logs", encode_message(question), timeout_s=AGENT_CALL_TIMEOUT_S
    )
    reply = decode_message(answer, LogsReply)
    return models.WorkerLog(
        run_id=row.id,
        worker=worker,
        node=found.node_id,
        epoch=reply.epoch,
        text=reply.text,
        size_bytes=reply.size_bytes,
    )


@router.get("/versions")
async def list_versions(
    request: Request, run: RunRef, limit: Limit = DEFAULT_LIMIT, cursor: Cursor = ""
) -> models.Page[models.Version]:
    """Committed versions, newest first."""
    services = services_of(request)
    row = await services.runs.resolve(run)
    rows = await services.versions.list(row.id, limit=limit + 1, before=decode_number_cursor(cursor))
    more = encode_cursor(str(rows[limit - 1].version)) if len(rows) > limit else None
    return models.Page[models.Version](items=[present.version(one) for one in rows[:limit]], next_cursor=more)


@router.get("/versions/{version}")
async def get_version(request: Request, run: RunRef, version: Annotated[int, Path(ge=0, lt=2**53)]) -> models.Version:
    """One committed version."""
    services = services_of(request)
    row = await services.runs.resolve(run)
    return present.version(await services.versions.get(row.id, version))


@router.get("/metrics")
async def get_metrics(
    request: Request,
    run: RunRef,
    after_step: Annotated[int, Query(ge=-1, lt=2**53, description="Only points of later versions.")] = -1,
    names: Annotated[str, Query(max_length=2_000, description="Comma-separated; all when empty.")] = "",
) -> models.Series:
    """Curves: for each metric its points [version, value] in order."""
    services = services_of(request)
    row = await services.runs.resolve(run)
    wanted = {name.strip() for name in names.split(",") if name.strip()}
    series: dict[str, list[tuple[int, float]]] = {}
    last = after_step
    for version, step_seconds, metrics in await services.versions.series(
        row.id, after=after_step, limit=METRIC_POINTS_MAX
    ):
        last = version
        values = present.numbers(metrics)
        if step_seconds is not None:
            values.setdefault("time/step", step_seconds)
        for name, value in values.items():
            if not wanted or name in wanted:
                series.setdefault(name, []).append((version, value))
    return models.Series(series=series, last_step=last)


@router.get("/timeline")
async def get_timeline(
    request: Request,
    run: RunRef,
    since: Annotated[
        datetime | None, Query(description="RFC 3339 with a time zone; from the start when absent.")
    ] = None,
) -> models.Timeline:
    """The fleet timeline: a lane of spans per worker, marks for versions, brackets for incidents."""
    services = services_of(request)
    if since is not None and since.tzinfo is None:
        raise UsageError("`since` has no time zone.", hint="Write it like 2026-01-01T00:00:00Z.")
    row = await services.runs.resolve(run)
    spans = await services.fleet.spans(row.id, since=since, limit=TIMELINE_SPANS_MAX)
    versions, incidents = await marks_since(services, row.id, since)
    return models.Timeline(
        since=since or row.created_at,
        until=SystemClock().wall(),
        lanes=_lanes(spans),
        versions=versions,
        incidents=incidents,
    )


@router.get("/incidents")
async def list_run_incidents(
    request: Request, run: RunRef, limit: Limit = DEFAULT_LIMIT, cursor: Cursor = ""
) -> models.Page[models.Incident]:
    """What failed in this run, newest first."""
    services = services_of(request)
    row = await services.runs.resolve(run)
    rows = await services.incidents.list(run_id=row.id, limit=limit + 1, before=decode_cursor(cursor))
    more = encode_cursor(rows[limit - 1].id) if len(rows) > limit else None
    return models.Page[models.Incident](items=await present_incidents(services, rows[:limit]), next_cursor=more)


@router.get("/audit")
async def get_audit(request: Request, run: RunRef) -> models.Audit:
    """The ledger's balance: every prompt group that was issued is somewhere, and none was used twice."""
    services = services_of(request)
    row = await services.runs.resolve(run)
    audit = await services.ledger.audit(row.id)
    return models.Audit(**asdict(audit), balance=audit.balance, balanced=audit.balanced, sound=audit.sound)


def _lanes(spans: list[tables.WorkerSpan]) -> list[models.Lane]:
    lanes: dict[str, models.Lane] = {}
    for row in spans:
        lane = lanes.setdefault(row.worker, models.Lane(worker=row.worker, role=row.role, spans=[]))
        lane.spans.append(present.span(row))
    return sorted(lanes.values(), key=lambda lane: (lane.role != "trainer", len(lane.worker), lane.worker))
