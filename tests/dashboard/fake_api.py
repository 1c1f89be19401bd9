"""The REST shapes of `/v1` over a made-up fleet, behind the real edge, login and dashboard; served on loopback by a thread."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import uvicorn
from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import Response, StreamingResponse
from prometheus_client import CollectorRegistry

from api.dashboard.routes import router as dashboard_router
from api.dashboard.routes import static
from api.http.auth import require_admin
from api.http.login import install_login
from api.http.metrics import HttpMetrics
from api.http.middleware import Edge
from api.http.problem import install_problem_handlers
from api.http.session import LoginLinks
from tests.dashboard.fleet import Fleet
from tests.dashboard.shapes import AUDIT, LOG, Json
from whimbrel.clock import rfc3339
from whimbrel.errors import NotFound

ADMIN = "wb_admin_dashboard"

router = APIRouter()


def fleet_of(request: Request) -> Fleet:
    return request.app.state.fleet


def make_app(fleet: Fleet) -> FastAPI:
    app = FastAPI(openapi_url=None)
    app.state.fleet = fleet
    app.state.posts = []
    app.state.admin_token = ADMIN
    app.state.login_links = LoginLinks()
    app.add_middleware(Edge, metrics=HttpMetrics(CollectorRegistry()))
    install_problem_handlers(app)
    app.include_router(router, dependencies=[Depends(require_admin)])
    app.include_router(dashboard_router, dependencies=[Depends(require_admin)])
    app.mount("/static", static)
    install_login(app)
    return app


@router.get("/v1/runs")
def list_runs(request: Request) -> Json:
    return {"items": fleet_of(request).runs, "next_cursor": None}


@router.get("/v1/runs/{run}")
def get_run(request: Request, run: str) -> Json:
    for one in fleet_of(request).runs:
        if run in (one["id"], one["name"]):
            return one
    raise NotFound(f"There is no run {run}.", hint="See `whimbrel run ls`.")


@router.get("/v1/runs/{run}/workers")
def list_workers(request: Request) -> Json:
    return {"items": fleet_of(request).workers()}


@router.get("/v1/runs/{run}/workers/{worker}/logs")
def read_logs(run: str, worker: str) -> Json:
    return {"run_id": run, "worker": worker, "node": "node-1", "epoch": 831, "text": LOG, "size_bytes": len(LOG)}


@router.get("/v1/runs/{run}/versions")
def list_versions(request: Request, limit: int = 50, cursor: str = "") -> Json:
    older = [one for one in reversed(fleet_of(request).versions) if not cursor or one["version"] < int(cursor)]
    return {"items": older[:limit], "next_cursor": str(older[limit - 1]["version"]) if len(older) > limit else None}


@router.get("/v1/runs/{run}/metrics")
def get_metrics(request: Request, after_step: int = -1, names: str = "") -> Json:
    series: dict[str, list[Any]] = {}
    last = after_step
    for version in fleet_of(request).versions[after_step + 1 :]:
        last = version["version"]
        for name, value in version["metrics"].items():
            if not names or name in names.split(","):
                series.setdefault(name, []).append([last, value])
    return {"series": series, "last_step": last}


@router.get("/v1/runs/{run}/timeline")
def get_timeline(request: Request, since: str = "") -> Json:
    fleet = fleet_of(request)
    roles = {"trainer": "trainer"}
    lanes = [
        {
            "worker": worker,
            "role": roles.get(worker, "rollout"),
            "spans": [span for span in spans if not span["ended_at"] or span["ended_at"] >= since],
        }
        for worker, spans in fleet.lanes.items()
    ]
    versions = [
        {**{key: one[key] for key in ("version", "kind", "committed_at")}, "snapshot": bool(one["snapshot"])}
        for one in fleet.versions
        if one["committed_at"] >= since
    ]
    keys = ("id", "kind", "worker", "node", "failed_at", "detected_at", "decided_at", "recovered_at", "message")
    incidents = [{key: one[key] for key in keys} for one in fleet.incidents]
    until = rfc3339(datetime.now(UTC))
    return {
        "since": since or rfc3339(fleet.began),
        "until": until,
        "lanes": lanes,
        "versions": versions,
        "incidents": incidents,
    }


@router.get("/v1/runs/{run}/incidents")
@router.get("/v1/incidents")
def list_incidents(request: Request) -> Json:
    return {"items": fleet_of(request).incidents[::-1], "next_cursor": None}


@router.get("/v1/incidents/{ref}")
def get_incident(request: Request, ref: str) -> Json:
    for one in fleet_of(request).incidents:
        if one["id"] == ref:
            return one
    raise NotFound(f"There is no incident {ref}.")


@router.get("/v1/runs/{run}/audit")
def get_audit() -> Json:
    return AUDIT


@router.get("/v1/runs/{run}/events")
def list_run_events(request: Request, limit: int = 50) -> Json:
    events = fleet_of(request).events
    return {"items": events[-limit:], "next_after": len(events)}


@router.get("/v1/nodes")
def list_nodes(request: Request) -> Json:
    return {"items": fleet_of(request).nodes, "next_cursor": None}


@router.post("/v1/{kind}/{name}/{verb}", status_code=202)
def act(request: Request, kind: str, name: str, verb: str) -> Json:
    request.app.state.posts.append(f"{kind}/{name}/{verb}")
    return {}


@router.get("/v1/events")
async def stream(request: Request) -> Response:
    events = fleet_of(request).events
    given = request.headers.get("last-event-id", "")
    after = int(given) if given else len(events)

    async def follow() -> AsyncIterator[str]:
        place = after
        yield f"id: {place}\nevent: ready\ndata: {{}}\n\n"
        while not request.app.state.server.should_exit:
            for event in events[place:]:
                place = event["id"]
                yield f"id: {place}\nevent: {event['kind']}\ndata: {_encode(event)}\n\n"
            await asyncio.sleep(0.05)

    return StreamingResponse(follow(), media_type="text/event-stream")


def _encode(event: Json) -> str:
    return json.dumps(event)


class Served:
    """An application on a port of loopback, which can go away and come back on the same port."""

    def __init__(self, app: FastAPI, port: int) -> None:
        self.app = app
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.start()

    def start(self) -> None:
        config = uvicorn.Config(
            self.app, port=self.port, log_level="error", timeout_graceful_shutdown=1, lifespan="off"
        )
        self._server = uvicorn.Server(config)
        self.app.state.server = self._server
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        deadline = time.monotonic() + 10
        while not self._server.started and time.monotonic() < deadline:
            time.sleep(0.01)
        assert self._server.started, "the fake API did not start"

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(10)
        assert not self._thread.is_alive(), "the fake API did not end"
