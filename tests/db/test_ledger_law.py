"""Any schedule of leases, reports, crashes, expiries, batches and commits keeps the ledger's laws.

Safety after every call: the audit is sound; what was finished is never lost or thrown away for age; no step trains on a
token outside the staleness bound or on a group twice; the batch of a step stays the same. Liveness at the end: with
rollouts at work and no more faults, the next steps get their batches.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, ClassVar, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from orchestrator.db import Database, Ledger, RunRepository
from tests.db.conftest import empty, run_apart
from tests.db.ledger_kit import Kit
from whimbrel.clock import ManualClock
from whimbrel.errors import Fenced
from whimbrel.limits import GROUP_LEASE_S
from whimbrel.wire.work import GroupFailure, GroupLease, GroupPartial

Result = TypeVar("Result")
WORKERS = ("rollout-0", "rollout-1", "rollout-2")


@dataclass
class Work:
    lease: GroupLease
    oldest: int


@dataclass
class Rollout:
    name: str
    epoch: int = 1
    version: int = 0
    work: dict[str, Work] = field(default_factory=dict)


class LedgerMachine(RuleBasedStateMachine):
    """The ledger and a model of what its callers know."""

    open_database: ClassVar[Any]

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.clock = ManualClock()
        self.database: Database = type(self).open_database(self.clock)
        self.ledger = Ledger(self.database, self.clock)
        self.rollouts = {name: Rollout(name) for name in WORKERS}
        self.head = 0
        self.oldest_of: dict[str, int] = {}
        """Oldest version by payload."""
        self.newest_of: dict[str, int] = {}
        self.finished: dict[str, str] = {}
        """Accepted payload by group."""
        self.batches: dict[int, list[str]] = {}
        self.consumed: set[str] = set()

    def do(self, work: Coroutine[Any, Any, Result]) -> Result:
        return self.loop.run_until_complete(work)

    @initialize(groups=st.integers(1, 3), staleness=st.integers(0, 3))
    def begin(self, groups: int, staleness: int) -> None:
        runs = RunRepository(self.database, self.clock)
        self.kit = self.do(Kit.create(self.ledger, runs, groups=groups, staleness=staleness, steps=1000))
        self.staleness = staleness

    # -- what rollouts do

    @rule(name=st.sampled_from(WORKERS), capacity=st.integers(1, 4))
    def lease(self, name: str, capacity: int) -> None:
        rollout = self.rollouts[name]
        reply = self.do(self.kit.lease(capacity, version=rollout.version, worker=name, epoch=rollout.epoch))
        assert len(reply.groups) == capacity or reply.reason
        for lease in reply.groups:
            oldest = min(rollout.version, self.oldest_of[lease.partial] if lease.partial else rollout.version)
            assert lease.consume_by <= oldest + self.staleness
            assert lease.group_id not in self.finished
            for other in self.rollouts.values():
                known = other.work.get(lease.group_id)
                assert known is None or known.lease.attempt < lease.attempt, "a group is leased twice"
            rollout.work[lease.group_id] = Work(lease, oldest)

    @rule(name=st.sampled_from(WORKERS), pick=st.integers(0, 9))
    def finish(self, name: str, pick: int) -> None:
        rollout = self.rollouts[name]
        if not rollout.work:
            return
        group_id = sorted(rollout.work)[pick % len(rollout.work)]
        work = rollout.work.pop(group_id)
        result = self.kit.result(work.lease, work.oldest, rollout.version)
        for _ in range(2):  # the answer to the first report is lost
            reply = self.do(self.kit.report(result, worker=name, epoch=rollout.epoch))
            assert "too old" not in reply.refused.get(group_id, ""), "work was thrown away for its age"
            if group_id in reply.accepted:
                assert self.finished.setdefault(group_id, result.payload) == result.payload
                self.oldest_of[result.payload], self.newest_of[result.payload] = work.oldest, rollout.version

    @rule(name=st.sampled_from(WORKERS), pick=st.integers(0, 9), tokens=st.integers(1, 5))
    def report_partial(self, name: str, pick: int, tokens: int) -> None:
        rollout = self.rollouts[name]
        if not rollout.work:
            return
        group_id = sorted(rollout.work)[pick % len(rollout.work)]
        work = rollout.work[group_id]
        payload = f"partial-{group_id}-{work.lease.attempt}-{tokens}"
        self.oldest_of[payload] = work.oldest
        partial = GroupPartial(
            group_id=group_id, attempt=work.lease.attempt, tokens=tokens, payload=payload, min_version=work.oldest
        )
        reply = self.do(self.kit.report(partial=[partial], worker=name, epoch=rollout.epoch))
        if group_id in reply.refused:
            assert "too old" not in reply.refused[group_id]
            del rollout.work[group_id]

    @rule(name=st.sampled_from(WORKERS), pick=st.integers(0, 9))
    def environment_fails(self, name: str, pick: int) -> None:
        rollout = self.rollouts[name]
        if not rollout.work:
            return
        work = rollout.work.pop(sorted(rollout.work)[pick % len(rollout.work)])
        failure = GroupFailure(group_id=work.lease.group_id, attempt=work.lease.attempt, reason="no answer")
        self.do(self.kit.report(failed=[failure], worker=name, epoch=rollout.epoch))

    @rule(name=st.sampled_from(WORKERS))
    def apply_newest(self, name: str) -> None:
        self.rollouts[name].version = self.head

    # -- faults

    @rule(name=st.sampled_from(WORKERS), told=st.booleans())
    def crash(self, name: str, told: bool) -> None:
        rollout = self.rollouts[name]
        if told:
            self.do(self.ledger.reassign(self.kit.run.id, name, rollout.epoch + 1))
        self.rollouts[name] = Rollout(name, rollout.epoch + 1, self.head)

    @rule()
    def every_lease_runs_out(self) -> None:
        self.clock.advance(GROUP_LEASE_S + 1)
        self.do(self.ledger.expire(self.kit.run.id))

    @rule()
    def controller_restarts(self) -> None:
        self.clock.advance(GROUP_LEASE_S + 1)
        self.do(self.ledger.extend_leases())
        assert self.do(self.ledger.expire(self.kit.run.id)) == []

    # -- what the trainer does

    @rule(ahead=st.integers(0, 1))
    def batch(self, ahead: int) -> None:
        self.fetch(self.head + ahead)

    def fetch(self, step: int, missing: list[str] | None = None) -> bool:
        reply = self.do(self.kit.batch(step, missing=missing))
        if not reply.ready:
            assert reply.reason
            assert step not in self.batches or missing or len(self.batches[step]) < self.kit.run.groups_per_step
            return False
        group_ids = [group.group_id for group in reply.groups]
        assert len(set(group_ids)) == self.kit.run.groups_per_step
        known = self.batches.get(step, [])
        assert group_ids[: len(known)] == known, "a step's batch changed"
        for group in reply.groups:
            assert group.payload == self.finished[group.group_id]
            assert step - self.oldest_of[group.payload] <= self.staleness, "trained on too late"
            assert self.newest_of[group.payload] <= step, "trained on a token of the future"
            assert group.group_id not in self.consumed
        self.batches[step] = group_ids
        return True

    @precondition(lambda self: self.batches.get(self.head))
    @rule(pick=st.integers(0, 9))
    def payload_is_missing(self, pick: int) -> None:
        known = self.batches[self.head]
        lost = known[pick % len(known)]
        del self.finished[lost]
        self.batches[self.head] = [one for one in known if one != lost]
        self.fetch(self.head, missing=[lost])

    @precondition(lambda self: len(self.batches.get(self.head, [])) == self.kit.run.groups_per_step)
    @rule()
    def commit(self) -> None:
        commit = self.kit.commit_of(self.head + 1, self.do(self.kit.batch(self.head)))
        assert self.do(self.ledger.mirror_commit(commit)).changed
        assert not self.do(self.ledger.mirror_commit(commit)).changed, "a commit was mirrored twice"
        committed = {group_id for group_id, _ in commit.groups}
        assert not committed & self.consumed, "a group was consumed twice"
        self.consumed |= committed
        self.head += 1

    # -- laws

    @invariant()
    def counts_add_up(self) -> None:
        audit = self.do(self.ledger.audit(self.kit.run.id))
        assert audit.sound, audit
        assert audit.consumed == len(self.consumed) == self.head * self.kit.run.groups_per_step
        assert audit.consumed + audit.batched + audit.buffered == len(self.finished), "finished work was lost"

    def teardown(self) -> None:
        try:
            if hasattr(self, "kit"):
                self.steps_go_on()
        finally:
            self.do(self.database.close())
            self.loop.close()

    def steps_go_on(self) -> None:
        goal = self.head + 2
        for _ in range(40):
            for name, rollout in self.rollouts.items():
                rollout.version = self.head
                self.lease(name, 4)
                while rollout.work:
                    self.finish(name, 0)
            if self.fetch(self.head):
                self.commit()
            self.counts_add_up()
            if self.head >= goal:
                return
            self.every_lease_runs_out()  # crashed holders are not there to finish
        pytest.fail(f"the run stands still at version {self.head}")


def run_machine(open_database: Any, examples: int) -> None:
    machine = type("Machine", (LedgerMachine,), {"open_database": staticmethod(open_database)})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )


MOVES = ("lease",) * 4 + ("finish",) * 4 + ("batch",) * 3 + ("commit",) * 2 + ("apply_newest", "apply_newest")
FAULTS = (
    "report_partial",
    "environment_fails",
    "crash",
    "every_lease_runs_out",
    "controller_restarts",
    "payload_is_missing",
)


def walk(machine: LedgerMachine, seed: int, steps: int) -> None:
    """A long random schedule: gets further into a run than hypothesis's short ones."""
    random = Random(seed)
    try:
        machine.begin(groups=random.randint(1, 3), staleness=random.randint(0, 3))
        for _ in range(steps):
            name, pick = random.choice(WORKERS), random.randrange(10)
            batch = machine.batches.get(machine.head, [])
            match random.choice(MOVES + FAULTS):
                case "lease":
                    machine.lease(name, random.randint(1, 4))
                case "batch":
                    machine.batch(random.randint(0, 1))
                case "report_partial":
                    machine.report_partial(name, pick, random.randint(1, 5))
                case "crash":
                    machine.crash(name, random.random() < 0.5)
                case "apply_newest":
                    machine.apply_newest(name)
                case "finish" | "environment_fails" as move:
                    getattr(machine, move)(name, pick)
                case "payload_is_missing" if batch:
                    machine.payload_is_missing(pick)
                case "commit" if len(batch) == machine.kit.run.groups_per_step:
                    machine.commit()
                case "every_lease_runs_out" | "controller_restarts" as fault:
                    getattr(machine, fault)()
            machine.counts_add_up()
    finally:
        machine.teardown()


@pytest.mark.parametrize("seed", range(3))
def test_a_long_random_schedule_keeps_the_laws(seed: int, sqlite_template: Path, tmp_path: Path):
    shutil.copy(sqlite_template, tmp_path / "controller.db")
    machine = type("Walk", (LedgerMachine,), {})
    machine.open_database = lambda clock: Database(f"sqlite:///{tmp_path / 'controller.db'}", clock)
    walk(machine(), seed, steps=150)


def test_any_schedule_keeps_the_laws_on_sqlite(sqlite_template: Path, tmp_path: Path):
    def open_database(clock: ManualClock) -> Database:
        for leftover in tmp_path.iterdir():
            leftover.unlink()
        shutil.copy(sqlite_template, tmp_path / "controller.db")
        return Database(f"sqlite:///{tmp_path / 'controller.db'}", clock)

    run_machine(open_database, examples=5)


@pytest.mark.postgresql
def test_any_schedule_keeps_the_laws_on_postgresql(postgres_url: str):
    def open_database(clock: ManualClock) -> Database:
        run_apart(empty(postgres_url))
        return Database(postgres_url, clock)

    run_machine(open_database, examples=3)


async def test_a_replaced_epoch_is_fenced_everywhere(kit: Kit):
    lease = (await kit.lease(1, epoch=4)).groups[0]
    await kit.put_epoch("rollout-0", 7)
    for call in (
        kit.lease(1, epoch=4),
        kit.report(kit.result(lease), epoch=4),
        kit.report(held=[lease.group_id], epoch=4),
    ):
        with pytest.raises(Fenced):
            await call
    await kit.put_epoch("trainer", 9)
    with pytest.raises(Fenced):
        await kit.batch(0, epoch=8)
