"""The whole application on SQLite, called in-process."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import httpx
import pytest
from fastapi import FastAPI

from api.app import create_app
from api.services import Services
from orchestrator.control import Controller
from orchestrator.db import Database, schema
from tests.api.support import ADMIN, CLUSTER, StubController
from whimbrel.log import configure_logging
from whimbrel.settings import Settings


@pytest.fixture(autouse=True, scope="session")
def _plain_logs() -> None:
    configure_logging("warning")


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with this release's schema, made once: each test starts from a copy."""
    path = tmp_path_factory.mktemp("schema") / "controller.db"
    asyncio.run(schema.upgrade(f"sqlite+aiosqlite:///{path}"))
    return path


@pytest.fixture
async def services(tmp_path: Path, empty_database: Path) -> AsyncIterator[Services]:
    settings = Settings(home=tmp_path, token=ADMIN, cluster_token=CLUSTER)
    shutil.copy(empty_database, tmp_path / "controller.db")
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
