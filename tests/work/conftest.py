"""The routes of workers and agents over a real database; what the loop knows is put in by hand."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from fastapi import FastAPI

from api.http.middleware import Edge  # noqa: F401  the problem handlers need its request ids
from api.http.problem import install_problem_handlers
from api.services import Services
from api.work.routes import router
from orchestrator.control.signals import OwnerFact, RunFact, Signals
from orchestrator.db import Commit, Database
from orchestrator.db.tables import Run
from tests.db.ledger_kit import spec
from whimbrel.clock import SystemClock
from whimbrel.settings import Settings
from whimbrel.wire import decode_message, encode_message

TOKEN = "wb_cluster_test"
EPOCH = 7


class Desk:
    """A caller of the routes."""

    def __init__(self, client: httpx.AsyncClient, services: Services, run: Run, signals: Signals) -> None:
        self.client, self.services, self.run, self.signals = client, services, run, signals
        self.incidents: list[Any] = []

    async def post(self, path: str, message: object, **headers: str) -> httpx.Response:
        body = message if isinstance(message, bytes) else encode_message(message)
        return await self.client.post(path, content=body, headers={"Authorization": f"Bearer {TOKEN}", **headers})

    async def ask(self, path: str, message: object, kind: type) -> Any:
        response = await self.post(path, message)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == "application/msgpack"
        return decode_message(response.content, kind)


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    settings = Settings(home=tmp_path, token="wb_admin_test", cluster_token=TOKEN)
    database = Database(settings.database_url)
    await database.start()
    signals = Signals(SystemClock(), lambda: None)
    recorded: list[Any] = []

    async def record_incident(incident: Any) -> None:
        signals.check_caller(incident.caller)
        recorded.append(incident)

    controller = SimpleNamespace(signals=signals, record_incident=record_incident)
    services = Services.build(settings, database, cast("Any", controller))
    run = await services.runs.create(spec())
    await services.ledger.mirror_commit(Commit(run_id=run.id, version=0, manifest="m0"))
    owners = {(run.id, name): OwnerFact("n1", EPOCH, True) for name in ("trainer", "rollout-0")}
    signals.learn(owners, {run.id: RunFact("running", "running", 0)}, {"n1": "127.0.0.1:1"})
    signals.serving = True
    app = FastAPI()
    app.state.services = services
    install_problem_handlers(app)
    app.include_router(router)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://controller") as client:
        desk = Desk(client, services, run, signals)
        desk.incidents = recorded
        yield desk
    await database.close()
