"""The composition root of a controller process: what it is made of, and which routes it serves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from fastapi import Depends, FastAPI
from prometheus_client import CollectorRegistry

from api.dashboard.routes import router as dashboard_router
from api.dashboard.routes import static
from api.http import health, scrape
from api.http.auth import require_admin
from api.http.docs import install_openapi
from api.http.login import install_login
from api.http.metrics import HttpMetrics
from api.http.middleware import Edge
from api.http.problem import PROBLEM_RESPONSES, install_problem_handlers
from api.http.session import LoginLinks
from api.services import Services
from api.v1 import events, incidents, nodes, run_parts, runs
from api.v1.sse import EventTail
from api.work.routes import router as work_router
from orchestrator.control import Controller
from orchestrator.db import Database, EventLog
from whimbrel.limits import CONTROLLER_STOP_S
from whimbrel.log import get_logger
from whimbrel.settings import Settings


async def open_services(settings: Settings) -> Services:
    """Open the database and put the parts of a controller together; nothing runs yet.

    etcd may be away: the control loop connects when it is back.

    Raises:
        SchemaMismatch: the database is of another release.
        Unreachable: the database does not answer.
    """
    settings.home.mkdir(parents=True, exist_ok=True)
    settings.read_cluster_token(create=True)
    settings.read_admin_token(create=True)
    database = Database(settings.database_url)
    await database.start()
    events = EventLog(database)
    controller = Controller(settings, database, events=events)
    return Services.build(settings, database, controller, events=events)


def create_app(services: Services) -> FastAPI:
    """The application around these services; its lifespan runs the control loop and closes the database."""
    app = FastAPI(title="Whimbrel", docs_url=None, redoc_url=None, openapi_url="/openapi.json", lifespan=_lifespan)
    registry = CollectorRegistry()
    app.state.services = services
    app.state.admin_token = services.admin_token
    app.state.login_links = LoginLinks()
    app.state.registry = registry
    app.state.http_metrics = HttpMetrics(registry)
    app.state.event_tail = EventTail(services.events.last_id)
    app.add_middleware(Edge, metrics=app.state.http_metrics)
    install_problem_handlers(app)
    for router in (runs.router, run_parts.router, nodes.router, incidents.router, events.router):
        app.include_router(router, dependencies=[Depends(require_admin)], responses=PROBLEM_RESPONSES)
    app.include_router(health.router, responses=PROBLEM_RESPONSES)
    app.include_router(scrape.router)
    app.include_router(work_router, include_in_schema=False)
    app.include_router(dashboard_router, dependencies=[Depends(require_admin)], include_in_schema=False)
    app.mount("/static", static, name="static")
    install_login(app)
    install_openapi(app)
    return app


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    services: Services = app.state.services
    loop = asyncio.create_task(services.controller.run(), name="controller")
    try:
        yield
    finally:
        await app.state.event_tail.close()
        services.controller.stop()
        _, unfinished = await asyncio.wait([loop], timeout=CONTROLLER_STOP_S)
        for task in unfinished:
            get_logger("api").warning("the control loop did not end in time; its leadership expires by itself")
            task.cancel()
            await asyncio.wait([task], timeout=CONTROLLER_STOP_S)
        await services.database.close()
