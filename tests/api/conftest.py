"""The whole application on SQLite, called in-process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import httpx
import pytest
from api.services import Services
from fastapi import FastAPI

from api.app import create_app
from orchestrator.control import Controller
from orchestrator.db import Database
from tests.api.support import ADMIN, CLUSTER, StubController
from whimbrel.settings import Settings


@pytest.fixture
async def services(tmp_path: Path) -> AsyncIterator[Services]:
    settings = Settings(home=tmp_path, token=ADMIN, cluster_token=CLUSTER)
    database = Database(settings.database_url)
    await database.start()
    yield Services.build(settings, database, cast("Controller", StubController()))
    await database.close()


@pytest.fixture
def controller(services: Services) -> StubController:
    return cast("StubController", services.controller)


@pytest.fixture
def app(services: Services) -> FastAPI:
    return create_app(services)


@pytest.fixture
async def anonymous(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=app, client=("127.0.0.1", 5000))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8600") as client:
        yield client


@pytest.fixture
async def api(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=app, client=("127.0.0.1", 5000))
    headers = {"Authorization": f"Bearer {ADMIN}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8600", headers=headers) as client:
        yield client
