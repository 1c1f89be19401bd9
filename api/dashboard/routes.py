"""The dashboard's pages and files. It has no data of its own: every number comes from `/v1`, under the same name."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from api.dashboard.pages import STATIC_DIR, render

router = APIRouter()

Name = Annotated[str, Path(max_length=80)]


class _Files(StaticFiles):
    """Files that browsers ask for again after an upgrade: by their ETag, which costs one short answer each."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers["cache-control"] = "no-cache"
        return response


static = _Files(directory=STATIC_DIR)


@router.get("/")
async def runs_page() -> HTMLResponse:
    """Is my run learning, is it fast, is it safe to walk away?"""
    return HTMLResponse(render("runs.html"))


@router.get("/runs")
async def runs_alias() -> RedirectResponse:
    """The path that one would guess."""
    return RedirectResponse("/", status_code=308)


@router.get("/runs/{run}")
async def run_page(run: Name) -> HTMLResponse:
    """One run: state, tiles, fleet timeline, plots, workers, incidents, events."""
    return HTMLResponse(render("run.html", run=run))


@router.get("/runs/{run}/versions")
async def versions_page(run: Name) -> HTMLResponse:
    """The chain of a run."""
    return HTMLResponse(render("versions.html", run=run))


@router.get("/runs/{run}/workers/{worker}/logs")
async def logs_page(run: Name, worker: Name) -> HTMLResponse:
    """The end of a worker's log."""
    return HTMLResponse(render("logs.html", run=run, worker=worker))


@router.get("/nodes")
async def nodes_page(request: Request) -> HTMLResponse:
    """The machines: who is here, since when not, and what runs on them."""
    return HTMLResponse(render("nodes.html", controller=str(request.base_url).rstrip("/")))


@router.get("/incidents")
async def incidents_page() -> HTMLResponse:
    """What failed in all runs and nodes, newest first."""
    return HTMLResponse(render("incidents.html"))


@router.get("/incidents/{incident}")
async def incident_page(incident: Name) -> HTMLResponse:
    """What failed, what the system did, and what it cost."""
    return HTMLResponse(render("incident.html", incident=incident))
