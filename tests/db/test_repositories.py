"""Runs, fleet, versions, incidents and events, on both databases."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from orchestrator.db import (
    Database,
    EventLog,
    FleetRepository,
    IncidentRepository,
    Ledger,
    RunRepository,
    VersionRepository,
)
from orchestrator.db.tables import Run
from tests.db.ledger_kit import Kit, spec
from whimbrel.clock import ManualClock
from whimbrel.errors import Conflict, Fenced, NotFound


@pytest.fixture
def runs(database: Database, clock: ManualClock) -> RunRepository:
    return RunRepository(database, clock)


@pytest.fixture
def fleet(database: Database, clock: ManualClock) -> FleetRepository:
    return FleetRepository(database, clock)


@pytest.fixture
async def run(runs: RunRepository) -> Run:
    return await runs.create(spec())


async def test_an_unfinished_name_is_taken_and_a_finished_one_is_free(runs: RunRepository, run: Run):
    with pytest.raises(Conflict, match="not finished"):
        await runs.create(spec())
    await runs.update(run.id, state="completed")
    newer = await runs.create(spec())
    assert (await runs.resolve("demo")).id == newer.id
    assert (await runs.resolve(run.id)).id == run.id
    assert [one.id for one in await runs.list()] == [newer.id, run.id]
    assert [one.id for one in await runs.list(before=newer.id)] == [run.id]
    assert [one.id for one in await runs.active()] == [newer.id]
    assert await runs.count() == {"completed": 1, "pending": 1}
    with pytest.raises(NotFound):
        await runs.resolve("nobody")


async def test_a_final_state_is_never_left(runs: RunRepository, run: Run):
    await runs.update(run.id, state="failed", reason="it is broken")
    with pytest.raises(Conflict):
        await runs.update(run.id, state="running")
    with pytest.raises(Conflict):
        await runs.want(run.id, "paused")
    assert (await runs.get(run.id)).reason == "it is broken"


async def test_each_change_of_desire_is_one_generation(runs: RunRepository, run: Run):
    assert [changed for _, changed in [await runs.want(run.id, "paused") for _ in range(2)]] == [True, False]
    assert (await runs.get(run.id)).generation == 2


async def test_time_adds_up_and_answers_are_remembered_once(runs: RunRepository, run: Run, clock: ManualClock):
    await runs.add_time(run.id, running_s=2.0, unavailable_s=0.5)
    await runs.add_time(run.id, running_s=1.0)
    row = await runs.get(run.id)
    assert (row.running_s, row.unavailable_s) == (3.0, 0.5)
    await runs.remember("k", "d1", 201, {"a": 1}, {})
    await runs.remember("k", "d2", 500, {}, {})
    kept = await runs.recall("k")
    assert kept is not None
    assert (kept.request_digest, kept.body) == ("d1", {"a": 1})
    await runs.prune_keys(clock.wall() + timedelta(seconds=1))
    assert await runs.recall("k") is None


async def test_deleting_a_run_takes_its_rows_along(runs: RunRepository, ledger: Ledger, kit: Kit):
    await kit.fill(0)
    await kit.batch(0)
    with pytest.raises(Conflict):
        await runs.delete(kit.run.id)
    await runs.update(kit.run.id, state="stopped")
    await runs.delete(kit.run.id)
    assert await ledger.counts(kit.run.id) == {}


async def test_the_timeline_follows_the_worker(fleet: FleetRepository, run: Run, clock: ManualClock):
    start = clock.wall()
    await fleet.put_worker(run.id, "trainer", epoch=3, state="starting", node_id="n1")
    clock.advance(2)
    await fleet.put_worker(run.id, "trainer", epoch=3, state="running", phase="working", policy_version=1)
    clock.advance(2)
    await fleet.put_worker(run.id, "trainer", policy_version=2, gauges={"tokens_per_s": 5.0})
    spans = await fleet.spans(run.id)
    assert [(span.state, span.phase) for span in spans] == [("starting", ""), ("running", "working")]
    assert spans[0].until == spans[1].since == start + timedelta(seconds=2)
    assert spans[1].until is None
    assert [span.state for span in await fleet.spans(run.id, since=start + timedelta(seconds=3))] == ["running"]
    worker = await fleet.worker(run.id, "trainer")
    assert (worker.role, worker.policy_version, worker.gauges) == ("trainer", 2, {"tokens_per_s": 5.0})
    await fleet.prune_spans(run.id, keep=0)
    assert [span.state for span in await fleet.spans(run.id)] == ["running"]


async def test_a_lower_epoch_cannot_overwrite_a_worker(fleet: FleetRepository, run: Run):
    await fleet.put_worker(run.id, "rollout-0", epoch=9, state="running")
    with pytest.raises(Fenced):
        await fleet.put_worker(run.id, "rollout-0", epoch=8, state="exited")
    assert (await fleet.worker(run.id, "rollout-0")).state == "running"


async def test_a_picture_taken_before_a_worker_moved_is_left_out_and_the_rest_of_it_is_written(
    fleet: FleetRepository, run: Run
):
    await fleet.put_worker(run.id, "trainer", epoch=9, state="pending", node_id="n2")
    old = [
        {"run_id": run.id, "name": "trainer", "epoch": 8, "state": "running", "node_id": "n1"},
        {"run_id": run.id, "name": "rollout-0", "epoch": 3, "state": "running"},
    ]
    with pytest.raises(Fenced):
        await fleet.put_workers(old)
    await fleet.put_workers(old, skip_old=True)
    assert (await fleet.worker(run.id, "trainer")).node_id == "n2"
    assert (await fleet.worker(run.id, "rollout-0")).state == "running"


async def test_nodes_are_kept_and_marked(fleet: FleetRepository, clock: ManualClock):
    await fleet.put_node("n1", incarnation="inc_1", resources={"slots": 4}, last_report_at=clock.wall())
    await fleet.put_node("n1", state="unreachable", reason="silent")
    node = await fleet.mark_node("n1", cordoned=True)
    assert (node.state, node.cordoned, node.draining, node.incarnation) == ("unreachable", True, False, "inc_1")
    assert node.last_report_at == clock.wall()
    with pytest.raises(NotFound):
        await fleet.mark_node("n2", draining=True)


async def test_versions_come_with_their_metrics(database: Database, kit: Kit):
    versions = VersionRepository(database)
    await kit.fill(0)
    commit = kit.commit_of(1, await kit.batch(0))
    await kit.ledger.mirror_commit(
        type(commit)(**{**vars(commit), "metrics": {"reward": 0.5}, "step_seconds": 1.5, "changed": 3, "total": 9})
    )
    latest = await versions.latest(kit.run.id)
    assert latest is not None
    assert (latest.version, latest.changed, latest.total) == (1, 3, 9)
    assert await versions.series(kit.run.id) == [(0, None, {}), (1, 1.5, {"reward": 0.5})]
    assert [row.version for row in await versions.list(kit.run.id, before=1)] == [0]
    await versions.mark_snapshot(kit.run.id, 1, "digest")
    assert (await versions.get(kit.run.id, 1)).snapshot == "digest"
    await versions.add_apply(kit.run.id, "rollout-0", 1, apply_ms=2.0)
    with pytest.raises(NotFound):
        await versions.get(kit.run.id, 7)


async def test_an_incident_goes_from_open_to_closed_once(database: Database, run: Run, clock: ManualClock):
    incidents = IncidentRepository(database, clock)
    facts = {"run_id": run.id, "kind": "worker_exit", "subject": "trainer", "summary": "The trainer ended."}
    incident = await incidents.open(**facts, incident_id="incident_1", worker="trainer", epoch=4)
    assert (await incidents.open(**facts, incident_id="incident_1")).detected_at == incident.detected_at
    clock.advance(1)
    for _ in range(2):
        await incidents.decide(incident.id, "restart", "first failure on n1")
    clock.advance(1)
    for cost in ({"steps_lost": 0}, {"steps_lost": 9}):
        await incidents.close(incident.id, cost=cost)
    row = await incidents.get(incident.id)
    assert row.decided_at is not None
    assert row.recovered_at is not None
    assert (row.decided_at - row.detected_at, row.recovered_at - row.decided_at) == (timedelta(seconds=1),) * 2
    assert (len(row.decisions), row.cost, row.state) == (1, {"steps_lost": 0}, "closed")
    assert await incidents.list(run_id=run.id, open=True) == []
    assert [one.id for one in await incidents.list(run_id=run.id, open=False)] == [incident.id]


async def test_events_are_read_on_from_any_id(database: Database, run: Run):
    events, elsewhere = EventLog(database), EventLog(database)
    await events.append("one", "First.", run_id=run.id, data={"a": 1})
    await elsewhere.append("two", "By another controller.")
    (first,) = await events.after(0, run_id=run.id)
    assert (first.kind, first.data) == ("one", {"a": 1})
    assert [event.kind for event in await events.after(first.id)] == ["two"]
    assert [event.kind for event in await events.latest(limit=1)] == ["two"]
    assert await events.last_id() == first.id + 1
    assert await events.prune(keep=1) == 1
    assert [event.kind for event in await events.after(0)] == ["two"]


async def test_events_of_writers_at_once_are_all_seen(database: Database):
    events = EventLog(database)
    writers = asyncio.gather(*(events.append("k", str(number)) for number in range(20)))
    ids: list[int] = []
    async with asyncio.timeout(30):
        while len(ids) < 20:  # a reader that follows by id while they write must not pass one over
            ids += [event.id for event in await events.after(ids[-1] if ids else 0)]
            await asyncio.sleep(0)
    await writers
    assert ids == sorted(set(ids))


async def test_workers_of_a_run_that_ended_unseen_are_settled(runs: RunRepository, fleet: FleetRepository, run: Run):
    await fleet.put_worker(run.id, "trainer", state="running", node_id="n1", epoch=5, phase="working", pids=[1])
    await fleet.settle_ended(())
    assert (await fleet.worker(run.id, "trainer")).state == "running", "the run is not over"
    await runs.update(run.id, state="completed")
    await fleet.settle_ended({run.id})
    assert (await fleet.worker(run.id, "trainer")).state == "running", "the loop still looks at it"
    await fleet.settle_ended(())
    settled = await fleet.worker(run.id, "trainer")
    assert (settled.state, settled.pids) == ("stopped", [])
    last = (await fleet.spans(run.id, limit=10))[-1]
    assert last.state == "stopped"
