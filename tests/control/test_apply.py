"""Effects are fenced and repeatable: a deposed leader changes nothing, and a crash after any effect changes no outcome."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select

from orchestrator.control.apply import Apply
from orchestrator.control.chronicle import Chronicle
from orchestrator.control.observe import Observer
from orchestrator.control.probe import Probes
from orchestrator.control.records import Records
from orchestrator.control.signals import Signals
from orchestrator.core import decide
from orchestrator.core.decisions import Plan, SetRunState, StartWorker
from orchestrator.db import Database, EventLog, FleetRepository, IncidentRepository, Ledger, RunRepository, tables
from whimbrel import wire
from whimbrel.clock import SystemClock
from whimbrel.coordination import Delete, Etcd, EtcdServer, PrefixView, keys
from whimbrel.errors import Fenced
from whimbrel.spec import parse_run_spec
from whimbrel.wire.cluster import Leader, NodeRecord, Ownership, Resources, WorkerRecord
from whimbrel.wire.work import AgentReport, Caller, Progress, WorkerExit, WorkerStatus

pytestmark = pytest.mark.etcd
SPEC = {"name": "toy", "model": "builtin:tiny", "max_steps": 3, "roles": {"rollout": {"count": 1}}}


class Crash(Exception):
    """The process ends here."""


class Fuse:
    """Counts effects and ends the process after one of them."""

    def __init__(self, after: int) -> None:
        self.left = after

    def burn(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise Crash


class Fused:
    """Passes calls on; each that ended may be the last."""

    def __init__(self, target: Any, fuse: Fuse) -> None:
        self._target, self._fuse = target, fuse

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._target, name)
        if not asyncio.iscoroutinefunction(method):
            return method

        async def call(*arguments: Any, **options: Any) -> Any:
            result = await method(*arguments, **options)
            self._fuse.burn()
            return result

        return call


class Bench:
    """A controller taken apart: passes are made by hand, workers and agents are what the test says they are."""

    def __init__(self, etcd: EtcdServer, database: Database) -> None:
        self.clock = SystemClock()
        self.etcd, self.database = Etcd([etcd.endpoint]), database
        self.view = PrefixView([etcd.endpoint], keys.PREFIX)
        self.signals = Signals(self.clock, lambda: None)
        self.probes = Probes(self._ask, self.clock, lambda: None)
        self.observer = Observer(self.view, self.signals, self.probes, self.clock)
        self.records, self.runs = Records(database), RunRepository(database)
        self.incidents, self.fleet = IncidentRepository(database), FleetRepository(database)
        self.epoch, self.sequence = 0, 0
        self.exited: dict[tuple[str, int], int] = {}

    async def _ask(self, _address: str) -> None:
        return None

    async def open(self) -> None:
        await self.view.start()
        await self.lead("first")
        record = NodeRecord(
            node_id="n1",
            incarnation="inc_1",
            address="127.0.0.1:1",
            resources=Resources(cpus=1, memory_bytes=1, slots=4),
        )
        await self.etcd.put(keys.node("n1"), wire.encode_json(record))
        await self.settle()

    async def close(self) -> None:
        await self.view.close()
        await self.etcd.close()

    async def lead(self, holder: str) -> None:
        await self.etcd.delete(keys.LEADER)
        self.epoch = await self.etcd.put(keys.LEADER, wire.encode_json(Leader(holder=holder, url="")))
        await self.database.take_leadership(self.epoch, holder)

    def effects(self, fuse: Fuse | None = None, epoch: int | None = None) -> Apply:
        fuse = fuse or Fuse(10_000)
        ledger = Ledger(self.database)
        chronicle = Chronicle(self.database, self.signals, self.clock, EventLog(self.database))
        return Apply(
            Fused(self.etcd, fuse),  # type: ignore[arg-type]
            epoch or self.epoch,
            chronicle=Fused(chronicle, fuse),  # type: ignore[arg-type]
            fleet=Fused(self.fleet, fuse),  # type: ignore[arg-type]
            ledger=Fused(ledger, fuse),  # type: ignore[arg-type]
            probes=self.probes,
        )

    async def settle(self) -> None:
        """Wait until the view has everything that was written."""
        _, revision = await self.etcd.list(keys.PREFIX)
        for _ in range(200):
            if self.view.healthy and self.view.revision >= revision:
                return
            await asyncio.sleep(0.01)
            last = max((item.mod_revision for item in self.view.items.values()), default=0)
            current = max((item.mod_revision for item in (await self.etcd.list(keys.PREFIX))[0]), default=0)
            if self.view.healthy and last == current:
                return
        raise AssertionError("the view does not settle")

    async def speak(self) -> None:
        """The agent starts what it owns; every worker lives, serves and says so, but those that the test ended."""
        self.signals.serving = True
        items, _ = await self.etcd.list(keys.OWNERS)
        statuses = []
        for item in items:
            owner = wire.decode_json(item.value, Ownership)
            code = self.exited.get((owner.worker, owner.start))
            state, ended = ("running", None) if code is None else ("exited", WorkerExit(code=code))
            if owner.state == "stopped":
                continue
            epoch = item.mod_revision
            statuses.append(
                WorkerStatus(run_id=owner.run_id, worker=owner.worker, epoch=epoch, state=state, exit=ended)  # type: ignore[arg-type]
            )
            if ended is None:
                record = WorkerRecord(
                    run_id=owner.run_id, worker=owner.worker, role=owner.role, epoch=epoch, node_id="n1", pid=1
                )
                await self.etcd.put(keys.worker(owner.run_id, owner.worker), wire.encode_json(record))
        await self.settle()
        self.observer.observe(await self.records.load(self.clock.wall(), set()))
        self.sequence += 1
        self.signals.agent_report(
            AgentReport(node_id="n1", incarnation="inc_1", sequence=self.sequence, workers=statuses)
        )
        for status in statuses:
            if status.exit is None:
                caller = Caller(run_id=status.run_id, worker=status.worker, epoch=status.epoch)
                self.signals.progress(Progress(caller=caller, phase="working", phase_age_s=0.0, policy_version=0))

    async def one_pass(self, fuse: Fuse | None = None) -> Plan:
        await self.speak()
        known = await self.records.load(self.clock.wall(), set())
        world = self.observer.observe(known)
        plan = decide(world)
        await self.effects(fuse).apply(plan, world, known, self.observer.registry)
        return plan

    async def until_quiet(self, fuse: Fuse | None = None) -> None:
        for _ in range(12):
            if not (await self.one_pass(fuse)).decisions:
                return
        raise AssertionError("the loop never comes to rest")

    async def outcome(self) -> dict[str, Any]:
        """What must not depend on where a crash was."""
        items, _ = await self.etcd.list(keys.OWNERS)
        owners = [wire.decode_json(item.value, Ownership) for item in items]
        run = (await self.runs.list(limit=1))[0]
        return {
            "owners": {one.worker: (one.node_id, one.state, one.start) for one in owners},
            "run": (run.state, run.reason, run.recoveries),
            "incidents": [(one.kind, one.worker, one.state) for one in await self.incidents.list()],
            "restarts": await self._restarts(run.id),
        }

    async def _restarts(self, run_id: str) -> int:
        query = select(func.count()).select_from(tables.Restart).where(tables.Restart.run_id == run_id)
        async with self.database.read() as session:
            return (await session.execute(query)).scalar_one()


@pytest.fixture
async def bench(own_etcd: EtcdServer, tmp_path: Path) -> AsyncIterator[Bench]:
    database = Database(f"sqlite+aiosqlite:///{tmp_path}/controller.db")
    await database.start()
    one = Bench(own_etcd, database)
    await one.open()
    yield one
    await one.close()
    await database.close()


async def test_a_deposed_leader_changes_nothing(bench: Bench) -> None:
    run = await bench.runs.create(parse_run_spec(SPEC))
    await bench.speak()
    known = await bench.records.load(bench.clock.wall(), set())
    world = bench.observer.observe(known)
    plan = decide(world)
    assert any(isinstance(one, StartWorker) for one in plan.decisions)
    old = bench.effects()
    await bench.lead("second")
    with pytest.raises(Fenced):
        await old.apply(plan, world, known, bench.observer.registry)
    states_only = Plan(tuple(one for one in plan.decisions if isinstance(one, SetRunState)), plan.wake_at_s)
    assert states_only.decisions
    with pytest.raises(Fenced):
        await old.apply(states_only, world, known, bench.observer.registry)
    assert (await bench.etcd.list(keys.OWNERS))[0] == []
    assert (await bench.runs.get(run.id)).state == "pending"


async def test_a_plan_made_on_an_old_epoch_starts_nothing_twice(bench: Bench) -> None:
    await bench.runs.create(parse_run_spec(SPEC))
    await bench.speak()
    known = await bench.records.load(bench.clock.wall(), set())
    world = bench.observer.observe(known)
    plan, registry = decide(world), bench.observer.registry
    await bench.effects().apply(plan, world, known, registry)
    before, _ = await bench.etcd.list(keys.OWNERS)
    await bench.effects().apply(plan, world, known, registry)
    assert (await bench.etcd.list(keys.OWNERS))[0] == before


async def test_a_crash_after_any_effect_ends_in_the_same_state(bench: Bench) -> None:
    expected = None
    for after in [10_000, *range(1, 30)]:
        fuse = Fuse(after)
        bench.exited.clear()
        run = await bench.runs.create(parse_run_spec(SPEC))
        crashed = await _survive(bench, fuse)
        bench.exited["trainer", 1] = 1
        bench.exited["rollout-0", 1] = 1
        crashed = await _survive(bench, fuse) or crashed
        outcome = await bench.outcome()
        expected = expected or outcome
        assert outcome == expected, f"a crash after effect {after} changed the outcome"
        assert outcome["owners"]["trainer"] == ("n1", "running", 2)
        assert outcome["restarts"] == 2
        await bench.etcd.txn([], [Delete(keys.owner(run.id, name)) for name in ("trainer", "rollout-0")])
        await bench.etcd.txn([], [Delete(keys.worker(run.id, name)) for name in ("trainer", "rollout-0")])
        await bench.runs.update(run.id, state="stopped")
        await bench.runs.delete(run.id)
        if after != 10_000 and not crashed:
            break
    else:
        raise AssertionError("there are more effects than crash points")


async def _survive(bench: Bench, fuse: Fuse) -> bool:
    try:
        await bench.until_quiet(fuse)
    except Crash:
        await bench.until_quiet()
        return True
    return False
