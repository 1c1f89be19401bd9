"""The loop over a real etcd and a real database: start, recover, survive outages, hand over, finish."""

from __future__ import annotations

import asyncio
import datetime as dt
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from orchestrator.control import Controller
from orchestrator.db import Database, FleetRepository, IncidentRepository, RunRepository, VersionRepository
from tests.control.fleet import FakeNode, Log
from whimbrel.coordination import EtcdServer
from whimbrel.errors import Fenced, StorageFull, Unreachable
from whimbrel.settings import Settings
from whimbrel.spec import parse_run_spec
from whimbrel.wire.work import Caller

pytestmark = pytest.mark.etcd

SPEC = {"name": "toy", "model": "builtin:tiny", "max_steps": 3, "roles": {"rollout": {"count": 2}}}


async def until(what: Callable[[], Awaitable[Any]], within_s: float = 12.0) -> Any:
    """Wait until `what` returns something true."""
    deadline, found = time.monotonic() + within_s, None
    while time.monotonic() < deadline:
        found = await what()
        if found:
            return found
        await asyncio.sleep(0.05)
    raise AssertionError(f"not within {within_s} s, last: {found!r}")


class World:
    """Everything one test needs."""

    def __init__(self, etcd: EtcdServer, home: Path, database: Database) -> None:
        self.etcd, self.database = etcd, database
        self.settings = Settings(home=home, etcd=etcd.endpoint, cluster_token="secret")
        self.runs, self.fleet = RunRepository(database), FleetRepository(database)
        self.incidents, self.versions = IncidentRepository(database), VersionRepository(database)
        self.controllers: list[Controller] = []

    @asynccontextmanager
    async def controller(self) -> AsyncIterator[Controller]:
        one = Controller(self.settings, self.database)
        self.controllers.append(one)
        task = asyncio.create_task(one.run())
        try:
            await until(lambda: _true(one.serving or len(self.controllers) > 1))
            yield one
        finally:
            one.stop()
            await asyncio.wait({task}, timeout=10)
            self.controllers.remove(one)

    def node(self, name: str) -> FakeNode:
        return FakeNode(name, [self.etcd.endpoint], self.controllers)

    async def state(self, run_id: str, *states: str, within_s: float = 12.0) -> str:
        async def reached() -> str:
            run = await self.runs.get(run_id)
            return run.state if run.state in states else ""

        return await until(reached, within_s)


async def _true(value: object) -> object:
    return value


@pytest.fixture
async def world(own_etcd: EtcdServer, tmp_path: Path) -> AsyncIterator[World]:
    database = Database(f"sqlite+aiosqlite:///{tmp_path}/controller.db")
    await database.start()
    yield World(own_etcd, tmp_path, database)
    await database.close()


async def test_a_run_starts_recovers_its_trainer_and_completes(world: World) -> None:
    async with world.controller(), world.node("n1") as node:
        run = await world.runs.create(parse_run_spec(SPEC))
        await world.state(run.id, "running")
        log = Log(world.settings.store_path, run.id, [world.etcd.endpoint])
        for _ in range(3):
            await log.commit()
        node.heads[run.id] = 2
        await until(lambda: _mirrored(world, run.id, 2))
        rows = await world.versions.list(run.id, limit=10)
        assert [row.version for row in rows] == [2, 1, 0]
        assert rows[0].metrics["reward"] == 0.5
        assert rows[0].full_bytes >= 128

        node.kill("trainer", 1, "ran out of memory")
        incident = (await until(lambda: world.incidents.list(run_id=run.id, open=False)))[0]
        assert incident.kind == "worker_exit"
        assert "ran out of memory" in incident.summary
        assert incident.log_tail == "last words"
        assert incident.cost["steps_lost"] == 0
        assert incident.cost["replayed_steps"] == 2
        assert incident.failed_at <= incident.detected_at <= incident.decided_at <= incident.recovered_at
        assert sorted(name for name, _ in node.started) == ["rollout-0", "rollout-1", "trainer", "trainer"]
        assert (await world.runs.get(run.id)).recoveries == 1

        trainer = await until(lambda: _shown(world, run.id, "trainer", 2))
        assert (trainer.phase, trainer.node_id, trainer.pids) == ("working", "n1", [7])
        spans = await world.fleet.spans(run.id, since=run.created_at, limit=100)
        assert {span.state for span in spans if span.worker == "trainer"} >= {"running"}

        await log.commit()
        node.heads[run.id] = 3
        node.kill("trainer", 0)
        await world.state(run.id, "completed")
        await until(lambda: _true(not node.workers))
        workers = await until(lambda: _all_in(world, run.id, "stopped"))
        assert len(workers) == 3
        await log.close()


async def _mirrored(world: World, run_id: str, version: int) -> bool:
    return (await world.runs.get(run_id)).mirrored_version >= version


async def _shown(world: World, run_id: str, name: str, start: int) -> Any:
    worker = await world.fleet.worker(run_id, name)
    return worker if worker.start == start and worker.state == "running" else None


async def _all_in(world: World, run_id: str, state: str) -> list[Any]:
    workers = await world.fleet.workers(run_id)
    return workers if all(worker.state == state for worker in workers) else []


async def test_a_stop_is_reported_only_when_the_agent_confirmed_it(world: World) -> None:
    async with world.controller() as controller, world.node("n1") as node:
        run = await world.runs.create(parse_run_spec(SPEC))
        await world.state(run.id, "running")
        trainer_epoch = dict(node.started)["trainer"]
        await world.runs.want(run.id, "stopped")
        controller.wake()
        await world.state(run.id, "stopped")
        assert not node.workers
        with pytest.raises(Fenced):
            controller.signals.check_caller(Caller(run_id=run.id, worker="trainer", epoch=trainer_epoch))


async def test_etcd_away_restarts_nothing_and_work_goes_on(world: World) -> None:
    async with world.controller() as controller, world.node("n1") as node:
        run = await world.runs.create(parse_run_spec(SPEC))
        await world.state(run.id, "running")
        world.etcd.kill()
        outage = (await until(lambda: world.incidents.list(open=True)))[0]
        assert outage.kind == "store_outage"
        assert not controller.etcd_reachable
        await asyncio.sleep(5)  # beyond the leadership's and near the workers' time to live
        assert controller.serving
        world.etcd.start()
        await until(lambda: _true(controller.leading), 20)
        await until(lambda: world.incidents.list(open=False), 25)
        assert len(node.started) == 3
        assert (await world.runs.get(run.id)).state == "running"
        assert [one.kind for one in await world.incidents.list()] == ["store_outage"]


async def test_another_controller_takes_over_without_restarting_a_worker(world: World) -> None:
    async with world.node("n1") as node:
        async with world.controller():
            run = await world.runs.create(parse_run_spec(SPEC))
            await world.state(run.id, "running")
        async with world.controller() as second:
            await until(lambda: world.incidents.list(open=False))
            await asyncio.sleep(3)
            incidents = await world.incidents.list()
            assert [one.kind for one in incidents] == ["controller_failover"]
            assert second.leading
        assert len(node.started) == 3


async def test_a_failover_that_a_lost_term_left_open_is_ended_by_the_next_term(world: World) -> None:
    now = dt.datetime.now(dt.UTC)
    left = await world.incidents.open(
        run_id=None, kind="controller_failover", subject="controller", summary="It stopped leading.", detected_at=now
    )

    async def ended() -> bool:
        return (await world.incidents.get(left.id)).state == "closed"

    async with world.controller():
        await until(ended)


async def test_a_standby_refuses_work_and_names_the_leader(world: World) -> None:
    async with world.controller() as first:
        await until(lambda: _true(first.leading))
        async with world.controller() as second:
            leader = await until(lambda: _true(second.leader))
            assert leader == first.leader
            assert not second.serving
            with pytest.raises(Unreachable):
                second.signals.check_caller(Caller(run_id="run_x", worker="trainer", epoch=1))


async def test_a_full_database_delays_the_record_of_versions_and_does_not_end_it(world: World) -> None:
    async with world.controller() as controller, world.node("n1") as node:
        run = await world.runs.create(parse_run_spec(SPEC))
        await world.state(run.id, "running")
        mirror_commit, refusals = controller._ledger.mirror_commit, [StorageFull("No room."), RuntimeError("a defect")]

        async def failing(*args: Any, **kwargs: Any) -> Any:
            if refusals:
                raise refusals.pop(0)
            return await mirror_commit(*args, **kwargs)

        controller._ledger.mirror_commit = failing  # type: ignore[method-assign]
        log = Log(world.settings.store_path, run.id, [world.etcd.endpoint])
        await log.commit()
        node.heads[run.id] = 0
        await until(lambda: _mirrored(world, run.id, 0))
        assert not refusals
        await log.close()


async def test_an_etcd_that_lost_its_data_is_told_with_what_to_do(world: World) -> None:
    await world.database.take_leadership(10**9, "before")
    controller = Controller(world.settings, world.database)
    task = asyncio.create_task(controller.run())
    try:
        reason = await until(lambda: _true("Put etcd's data back" in controller.etcd_reason and controller.etcd_reason))
        assert "epoch 1000000000 led here" in reason
        assert not controller.serving
    finally:
        controller.stop()
        await asyncio.wait({task}, timeout=10)
