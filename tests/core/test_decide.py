"""Safety and liveness of `decide`, over a toy cluster with seeded faults."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.core import decide, lifecycle
from orchestrator.core.decisions import (
    CloseIncident,
    MarkNode,
    ReassignGroups,
    RecordIncident,
    SetRunState,
    StartWorker,
    StopWorker,
)
from orchestrator.core.world import Lease, OpenIncident, Probe
from tests.core.cluster import TICK_S, Cluster
from tests.core.faults import FAULT_NAMES, inject
from whimbrel.errors import EXIT_FENCED, EXIT_USER_ERROR
from whimbrel.limits import HANG_FLOOR_S, RESTART_BUDGET, STORE_HOLD_S

FEW = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def running(nodes: int = 3, jobs: int = 1, *, slots: int = 4, rollouts: int = 2) -> Cluster:
    cluster = Cluster(nodes, jobs, slots=slots, rollouts=rollouts)
    cluster.run_for(10)
    assert cluster.healthy(), [(job.state, job.reason) for job in cluster.jobs.values()]
    cluster.applied.clear()
    return cluster


def applied(cluster: Cluster, kind: type) -> list:
    return [decision for decision in cluster.applied if isinstance(decision, kind)]


faults = st.lists(
    st.tuples(
        st.sampled_from(FAULT_NAMES),
        st.integers(0, 2),
        st.integers(0, 12),
    ),
    max_size=12,
)


@FEW
@given(faults, st.integers(0, 4))
def test_after_faults_stop_every_run_is_healthy_again(schedule: list[tuple[str, int, int]], cut: int) -> None:
    cluster = Cluster(3, 1)
    cluster.run_for(6)
    for fault, which, ticks in schedule:
        inject(cluster, fault, which)
        for _ in range(ticks):
            before = cluster.store.reachable
            plan = cluster.tick(cut=cut if ticks % 3 == 0 else None)
            if not before:
                assert not [one for one in plan.decisions if isinstance(one, StartWorker | StopWorker | MarkNode)]
            started = Counter((one.run_id, one.worker) for one in plan.decisions if isinstance(one, StartWorker))
            assert all(count == 1 for count in started.values()), "a part was given to two nodes in one plan"
    cluster.return_etcd()
    for node_id in cluster.machines:
        cluster.start_agent(node_id)
    for name in ("trainer", "rollout-0", "rollout-1"):
        cluster.pause_worker("run_0", name, paused=False)
    job = cluster.jobs["run_0"]
    for _ in range(int(150 / TICK_S)):
        cluster.tick()
        if cluster.healthy() or job.state == "failed":
            break
    budget_spent = max(Counter(who for who, past in job.failures if past.charged).values(), default=0) > RESTART_BUDGET
    assert cluster.healthy() or (job.state == "failed" and budget_spent), (job.state, job.reason, job.open)


@FEW
@given(faults)
def test_the_same_world_gives_the_same_plan(schedule: list[tuple[str, int, int]]) -> None:
    cluster = Cluster(3, 2)
    for fault, which, ticks in schedule:
        inject(cluster, fault, which)
        for _ in range(ticks):
            cluster.tick()
        world = cluster.world()
        shuffled = dataclasses.replace(world, nodes=world.nodes[::-1], runs=world.runs[::-1])
        assert decide(world) == decide(world) == decide(shuffled)


@FEW
@given(faults, st.sampled_from(sorted(lifecycle.TERMINAL)))
def test_terminal_is_final(schedule: list[tuple[str, int, int]], state: str) -> None:
    cluster = running()
    job = cluster.jobs["run_0"]
    job.state, job.history = state, []
    for fault, which, ticks in schedule:
        inject(cluster, fault, which)
        job.desired = ("running", "stopped", "paused")[which]
        for _ in range(ticks):
            cluster.tick()
    assert job.state == state
    assert not applied(cluster, StartWorker)


def test_a_stopped_run_places_nothing_and_says_stopped_only_when_every_process_ended() -> None:
    cluster = running()
    job = cluster.jobs["run_0"]
    job.desired, job.generation = "stopped", 2
    cluster.machines["n0"].agent = "paused"
    busy = [name for name, owner in job.owners.items() if owner.node_id == "n0"]
    assert busy
    cluster.run_for(4)
    assert job.state == "running"
    assert "n0" in job.reason
    cluster.machines["n0"].agent = "running"
    cluster.run_for(5)
    assert job.state == "stopped"
    assert not applied(cluster, StartWorker)
    assert not any(machine.processes for machine in cluster.machines.values() if machine.agent == "running")


def test_a_stop_waits_for_a_process_that_no_signal_ends() -> None:
    cluster = running()
    job = cluster.jobs["run_0"]
    machine = cluster.machines[job.owners["trainer"].node_id]
    machine.processes["run_0", "trainer"].state = "stuck"
    job.desired, job.generation = "stopped", 2
    cluster.run_for(10)
    assert job.state == "running"
    assert "trainer has not ended" in job.reason
    machine.processes["run_0", "trainer"].state = "exited"
    cluster.run_for(3)
    assert job.state == "stopped"


def test_a_created_run_waits_for_its_start() -> None:
    cluster = Cluster(1, 1)
    job = cluster.jobs["run_0"]
    job.desired = "stopped"
    cluster.run_for(3)
    assert job.state == "pending"
    job.desired, job.generation = "running", 2
    cluster.run_for(10)
    assert job.state == "running"
    job.desired, job.generation = "stopped", 3
    cluster.run_for(10)
    assert job.state == "stopped"


def test_etcd_down_stops_no_worker_and_declares_nobody_dead() -> None:
    cluster = running()
    cluster.lose_etcd()
    cluster.run_for(60)
    cluster.return_etcd()
    cluster.run_for(STORE_HOLD_S + 20)
    assert not applied(cluster, StartWorker)
    assert not applied(cluster, MarkNode)
    kinds = [one.kind for one in applied(cluster, RecordIncident)]
    assert kinds == ["store_outage"]
    assert not cluster.incidents


def test_a_worker_exit_is_acted_on_at_once() -> None:
    cluster = running()
    cluster.kill_worker("run_0", "trainer", 1, "boom")
    cluster.tick()
    assert [one.worker for one in applied(cluster, StartWorker)] == ["trainer"]
    cluster.run_for(8)
    assert cluster.healthy()
    assert len(applied(cluster, RecordIncident)) == 1
    assert len(applied(cluster, CloseIncident)) == 1
    assert "boom" in applied(cluster, RecordIncident)[0].reason


def test_a_killed_rollout_loses_its_groups_once_and_nothing_else_restarts() -> None:
    cluster = running()
    cluster.kill_worker("run_0", "rollout-1", None)
    cluster.run_for(10)
    assert [one.worker for one in applied(cluster, StartWorker)] == ["rollout-1"]
    assert len(applied(cluster, ReassignGroups)) == 1
    assert "recovering" not in cluster.jobs["run_0"].history


def test_a_lost_node_moves_its_workers() -> None:
    cluster = running()
    cluster.kill_node("n0")
    cluster.run_for(25)
    assert [one.state for one in applied(cluster, MarkNode)][-1] == "lost"
    assert all(one.node_id != "n0" for one in applied(cluster, StartWorker))
    assert cluster.healthy()
    assert {one.kind for one in applied(cluster, RecordIncident)} == {"agent_lost", "node_lost"}


def test_workers_wait_with_a_reason_when_no_node_is_left_and_return_with_it() -> None:
    cluster = running(nodes=1)
    cluster.kill_node("n0")
    cluster.run_for(20)
    job = cluster.jobs["run_0"]
    assert job.state == "recovering"
    assert "n0 is lost" in job.reason
    cluster.start_agent("n0")
    cluster.run_for(30)
    assert cluster.healthy()


def test_a_paused_agent_restarts_nothing_while_its_workers_live() -> None:
    cluster = running()
    cluster.machines["n0"].agent = "paused"
    cluster.run_for(40)
    assert [one.state for one in applied(cluster, MarkNode)] == ["unreachable"]
    cluster.machines["n0"].agent = "running"
    cluster.run_for(5)
    assert not applied(cluster, StartWorker)
    assert cluster.healthy()


def test_a_killed_agent_that_returns_adopts_its_workers() -> None:
    cluster = running()
    cluster.machines["n0"].agent = "dead"
    cluster.run_for(10)
    cluster.start_agent("n0")
    cluster.run_for(10)
    assert not applied(cluster, StartWorker)


def test_a_node_that_restarts_quickly_gets_its_workers_again() -> None:
    cluster = running()
    cluster.kill_node("n0")
    cluster.start_agent("n0")
    cluster.run_for(25)
    assert cluster.healthy()
    assert {one.kind for one in applied(cluster, RecordIncident)} == {"worker_lost"}


def test_a_pause_shorter_than_the_lease_changes_nothing() -> None:
    cluster = running()
    cluster.pause_worker("run_0", "trainer")
    cluster.run_for(5)
    cluster.pause_worker("run_0", "trainer", paused=False)
    cluster.run_for(10)
    assert not cluster.applied


def test_a_paused_worker_is_replaced_under_a_new_epoch() -> None:
    cluster = running()
    epoch = cluster.jobs["run_0"].owners["trainer"].epoch
    cluster.pause_worker("run_0", "trainer")
    cluster.run_for(15)
    assert [one.kind for one in applied(cluster, RecordIncident)] == ["worker_paused"]
    assert cluster.jobs["run_0"].owners["trainer"].epoch > epoch
    assert cluster.healthy()


@FEW
@given(st.sampled_from(["node_lease", "worker_lease", "report", "progress"]), st.sampled_from(["trainer", "rollout-0"]))
def test_one_witness_never_suffices(missing: str, name: str) -> None:
    cluster = running()
    world = dataclasses.replace(cluster.world(), now_s=cluster.now_s + 30)
    run = world.runs[0]
    gone = Lease(present=False, since_s=world.now_s - 20)
    target = next(worker for worker in run.workers if worker.name == name)
    assert target.owner is not None
    workers, nodes = [], []
    for worker in run.workers:
        assert worker.progress is not None
        fresh = dataclasses.replace(worker.progress, received_at_s=world.now_s, changed_at_s=world.now_s)
        worker = dataclasses.replace(worker, progress=fresh)
        if worker.name == name and missing == "worker_lease":
            worker = dataclasses.replace(worker, lease=gone)
        if worker.name == name and missing == "progress":
            worker = dataclasses.replace(worker, progress=None)
        workers.append(worker)
    for node in world.nodes:
        node = dataclasses.replace(node, reported_at_s=world.now_s)
        if node.node_id == target.owner.node_id and missing == "node_lease":
            node = dataclasses.replace(node, lease=gone)
        if node.node_id == target.owner.node_id and missing == "report":
            node = dataclasses.replace(node, reported_at_s=world.now_s - 25)
        nodes.append(node)
    run = dataclasses.replace(run, workers=tuple(workers))
    plan = decide(dataclasses.replace(world, runs=(run,), nodes=tuple(nodes)))
    assert not [one for one in plan.decisions if isinstance(one, StartWorker)]
    recorded = [one.kind for one in plan.decisions if isinstance(one, RecordIncident)]
    assert recorded == (["agent_lost"] if missing == "node_lease" else []), "only the silence of the agent itself"
    assert not [one for one in plan.decisions if isinstance(one, MarkNode) and one.state == "lost"]


@pytest.mark.parametrize("sign", ["report", "probe"])
def test_a_node_without_lease_and_with_silent_workers_is_not_lost_while_its_agent_is_heard(sign: str) -> None:
    cluster = running()
    cluster.kill_node("n0")
    cluster.run_for(15)
    world = dataclasses.replace(cluster.world(), now_s=cluster.now_s + 30)
    now_s = world.now_s
    lost = next(node for node in world.nodes if node.node_id == "n0")
    assert lost.state == "lost"
    if sign == "report":
        heard = dataclasses.replace(lost, state="ready", reported_at_s=now_s)
    else:
        heard = dataclasses.replace(lost, state="ready", probe=Probe(now_s, answered=True))
    later = dataclasses.replace(world, nodes=(heard,), runs=())
    states = [one.state for one in decide(later).decisions if isinstance(one, MarkNode)]
    assert states == ["unreachable"]
    silent = dataclasses.replace(later, nodes=(dataclasses.replace(lost, state="ready"),))
    assert [one.state for one in decide(silent).decisions if isinstance(one, MarkNode)] == ["lost"]


def test_many_leases_gone_at_once_is_the_stores_trouble_first() -> None:
    cluster = running(nodes=4, jobs=2)
    for node_id in ("n0", "n1", "n2"):
        cluster.kill_node(node_id)
    cluster.run_for(6 + STORE_HOLD_S - 1)
    assert not applied(cluster, StartWorker)
    cluster.run_for(20)
    assert applied(cluster, StartWorker)


def test_a_hang_is_found_only_beyond_the_learnt_bound() -> None:
    cluster = running()
    world = cluster.world()
    run = world.runs[0]

    def stalled(age_s: float, slowest_s: float, phase: str = "working") -> bool:
        now_s = world.now_s + 2 * age_s
        workers = []
        for worker in run.workers:
            assert worker.progress is not None
            progress = dataclasses.replace(worker.progress, received_at_s=now_s, changed_at_s=now_s)
            if worker.name == "trainer":
                progress = dataclasses.replace(progress, changed_at_s=now_s - age_s, phase=phase)
            workers.append(dataclasses.replace(worker, progress=progress, slowest_s={"working": slowest_s}))
        nodes = tuple(dataclasses.replace(node, reported_at_s=now_s) for node in world.nodes)
        later = dataclasses.replace(
            world, now_s=now_s, nodes=nodes, runs=(dataclasses.replace(run, workers=tuple(workers)),)
        )
        plan = decide(later)
        return any(isinstance(one, RecordIncident) and one.kind == "worker_hang" for one in plan.decisions)

    assert not stalled(HANG_FLOOR_S - 1, 0.1)
    assert stalled(HANG_FLOOR_S + 1, 0.1)
    assert not stalled(HANG_FLOOR_S + 1, 30.0)
    assert stalled(181.0, 30.0)
    assert not stalled(10_000.0, 0.1, "waiting")


def test_a_crash_loop_ends_with_its_cause() -> None:
    cluster = running(nodes=1)
    for _ in range(600):
        cluster.kill_worker("run_0", "rollout-0", 1, "bad weights")
        cluster.tick()
    job = cluster.jobs["run_0"]
    assert job.state == "failed"
    assert "bad weights" in job.reason
    assert f"{RESTART_BUDGET + 1} times" in job.reason
    assert not any(owner.running for owner in job.owners.values())


def test_the_same_user_error_twice_fails_the_run_with_that_sentence() -> None:
    cluster = running()
    for _ in range(2):
        cluster.kill_worker("run_0", "trainer", EXIT_USER_ERROR, "No such folder: /models/x.")
        cluster.run_for(6)
    job = cluster.jobs["run_0"]
    assert job.state == "failed"
    assert "No such folder: /models/x." in job.reason


def test_a_user_error_that_names_another_prompt_each_time_is_the_same_one() -> None:
    cluster = running()
    for number in range(2):
        cluster.kill_worker("run_0", "rollout-0", EXIT_USER_ERROR, f"reward({number}) raised ValueError.")
        cluster.run_for(6)
    assert cluster.jobs["run_0"].state == "failed"


def test_a_fenced_exit_of_the_current_epoch_is_restarted_uncharged() -> None:
    cluster = running()
    cluster.kill_worker("run_0", "trainer", EXIT_FENCED)
    cluster.run_for(8)
    assert cluster.healthy()
    assert [one.charged for one in applied(cluster, RecordIncident)] == [False]


def test_failing_in_place_moves_to_another_node() -> None:
    cluster = running()
    home = cluster.jobs["run_0"].owners["trainer"].node_id
    for _ in range(3):
        cluster.kill_worker("run_0", "trainer", 1)
        cluster.run_for(8)
    homes = [one.node_id for one in applied(cluster, StartWorker)]
    assert homes[:2] == [home, home]
    assert homes[2] != home


@pytest.mark.parametrize("code", [0, 1, None])
def test_a_trainer_that_ends_after_the_last_version_completes_the_run(code: int | None) -> None:
    cluster = running()
    job = cluster.jobs["run_0"]
    job.max_steps = job.head
    cluster.kill_worker("run_0", "trainer", code)
    cluster.run_for(4)
    assert job.state == "completed"
    assert not any(owner.running for owner in job.owners.values())
    assert not applied(cluster, StartWorker)


def test_a_trainer_that_ends_before_its_target_is_never_completed() -> None:
    cluster = running()
    cluster.kill_worker("run_0", "trainer", 0)
    cluster.run_for(10)
    assert "completed" not in cluster.jobs["run_0"].history
    assert cluster.healthy()


def test_a_paused_run_keeps_its_workers() -> None:
    cluster = running()
    job = cluster.jobs["run_0"]
    job.desired, job.generation = "paused", 2
    cluster.run_for(5)
    assert job.state == "paused"
    assert not applied(cluster, StopWorker)
    job.desired, job.generation = "running", 3
    cluster.run_for(2)
    assert job.state == "running"
    assert [one.state for one in applied(cluster, SetRunState)] == ["paused", "running"]


def test_a_large_cluster_is_decided_on_in_well_under_a_second() -> None:
    cluster = Cluster(200, 100, slots=6, rollouts=9)
    for _ in range(12):
        cluster.tick()
    world = cluster.world()
    begun = time.perf_counter()
    decide(world)
    assert time.perf_counter() - begun < 0.8


def test_an_agent_that_came_back_as_another_process_is_recorded_and_closed_when_it_reports() -> None:
    world = running().world()
    first = world.nodes[0]
    changed = dataclasses.replace(first, incarnation="old", registered="new", recorded="old")
    world = dataclasses.replace(world, nodes=(changed, *world.nodes[1:]))
    recorded = [one for one in decide(world).decisions if isinstance(one, RecordIncident)]
    assert [(one.kind, one.node_id, one.charged) for one in recorded] == [("agent_restart", first.node_id, False)]
    open_one = OpenIncident("incident_1", "agent_restart", world.now_s, node_id=first.node_id)
    silent = dataclasses.replace(world, incidents=(open_one,))
    assert not [one for one in decide(silent).decisions if isinstance(one, RecordIncident | CloseIncident)]
    back = dataclasses.replace(changed, incarnation="new", recorded="new")
    heard = dataclasses.replace(silent, nodes=(back, *world.nodes[1:]))
    closed = [one for one in decide(heard).decisions if isinstance(one, CloseIncident)]
    assert [one.incident_id for one in closed] == ["incident_1"]
