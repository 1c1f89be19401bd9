"""Law 5 for the database: while it does not answer nothing is restarted or lost, versions go on, and its return is enough."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from orchestrator.db import Database
from tests.control.fleet import Log
from tests.control.test_controller import SPEC, World, until
from whimbrel.coordination import EtcdServer
from whimbrel.errors import Unreachable
from whimbrel.limits import LEADER_LEASE_TTL_S
from whimbrel.spec import parse_run_spec

pytestmark = pytest.mark.etcd


class Distant(Database):
    """A database behind a link that can be cut."""

    away = False

    def _reach(self) -> None:
        if self.away:
            raise Unreachable("The database does not answer.")

    @asynccontextmanager
    async def read(self) -> AsyncGenerator[AsyncSession, None]:
        self._reach()
        async with super().read() as session:
            yield session

    @asynccontextmanager
    async def write(self, leader: int | None = None) -> AsyncGenerator[AsyncSession, None]:
        self._reach()
        async with super().write(leader) as session:
            yield session


@pytest.fixture
async def distant(own_etcd: EtcdServer, tmp_path: Path) -> AsyncIterator[tuple[World, Distant]]:
    database = Distant(f"sqlite+aiosqlite:///{tmp_path}/controller.db")
    await database.start()
    yield World(own_etcd, tmp_path, database), database
    await database.close()


async def test_law_5_a_database_that_is_away_restarts_nothing_and_versions_go_on(
    distant: tuple[World, Distant],
) -> None:
    world, database = distant
    async with world.controller() as controller, world.node("n1") as node:
        run = await world.runs.create(parse_run_spec(SPEC))
        await world.state(run.id, "running")
        log = Log(world.settings.store_path, run.id, [world.etcd.endpoint])
        await log.commit()
        database.away = True
        for _ in range(2):
            await log.commit()
        await asyncio.sleep(LEADER_LEASE_TTL_S + 1)
        assert controller.leading, "leadership is etcd's; the database has no say in it"
        assert len(node.started) == 3
        database.away = False

        async def mirrored() -> bool:
            return (await world.runs.get(run.id)).mirrored_version == 2

        await until(mirrored, 30)
        assert (await world.runs.get(run.id)).state == "running"
        assert len(node.started) == 3
        assert await world.incidents.list() == []
        await log.close()
