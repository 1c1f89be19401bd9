"""The ledger, behaviour by behaviour, on both databases."""

from __future__ import annotations

import asyncio

import pytest

from orchestrator.core.staleness import Places
from orchestrator.db import Commit, Database, Ledger, RunRepository
from orchestrator.db.groups import places
from orchestrator.db.leasing import group_id_of
from orchestrator.db.runs import locked_run
from orchestrator.db.tables import Batch
from tests.db.ledger_kit import Kit
from whimbrel.clock import ManualClock
from whimbrel.errors import Conflict, LimitReached, NotFound
from whimbrel.limits import GROUP_ATTEMPTS, GROUP_LEASE_S, REPORT_GROUPS_MAX
from whimbrel.wire.work import GroupFailure, GroupPartial


async def test_leases_stop_at_the_staleness_bound_and_say_so(kit: Kit):
    reply = await kit.lease(64)
    assert [lease.index for lease in reply.groups] == [0, 1, 2, 3]  # steps 0 and 1, two groups each
    assert "Staleness bound" in reply.reason
    assert {lease.consume_by for lease in reply.groups} == {1}


async def test_no_version_or_a_paused_run_gives_no_work(ledger: Ledger, database: Database):
    runs = RunRepository(database)
    kit = Kit(ledger, await runs.create(await _spec("early")))
    assert "No version" in (await kit.lease(1)).reason
    await kit.commit(0)
    await runs.want(kit.run.id, "paused")
    assert "paused" in (await kit.lease(1)).reason
    await runs.update(kit.run.id, state="stopped")
    assert "stopped" in (await kit.lease(1)).reason


async def _spec(name: str):
    from tests.db.ledger_kit import spec

    return spec(name)


async def test_a_lagging_rollout_gets_only_work_that_will_be_in_time(kit: Kit):
    await kit.fill(0)
    await kit.commit(1, await kit.batch(0))
    assert (await kit.lease(4, version=0)).groups == []
    assert len((await kit.lease(4, version=1)).groups) == 2


async def test_a_lagging_rollout_does_not_take_a_returned_group_that_it_would_finish_too_late(kit: Kit):
    old = (await kit.lease(4)).groups
    await kit.report(kit.result(old[0]), kit.result(old[1]))
    await kit.commit(1, await kit.batch(0))
    await kit.lease(2, version=1, worker="rollout-1")
    await kit.ledger.reassign(kit.run.id, "rollout-1", 2)
    assert (await kit.lease(2, version=0, worker="rollout-2")).groups == []  # step 1 is full with what rollout-0 holds
    assert len((await kit.lease(2, version=1, worker="rollout-2")).groups) == 2


async def test_the_last_steps_need_no_more_groups(ledger: Ledger, database: Database):
    kit = await Kit.create(ledger, RunRepository(database), groups=2, staleness=4, steps=3)
    reply = await kit.lease(64)
    assert len(reply.groups) == 6
    assert "3 steps" in reply.reason


async def test_the_batch_of_a_step_is_the_same_for_every_trainer_epoch_until_committed(kit: Kit):
    await kit.fill(0)
    first = await kit.batch(0, epoch=1)
    assert first.ready
    assert await kit.batch(0, epoch=5) == first
    ahead = await kit.batch(1, epoch=5)
    assert ahead.ready
    assert not {group.group_id for group in ahead.groups} & {group.group_id for group in first.groups}
    await kit.commit(1, first)
    assert await kit.batch(0, epoch=5) == first  # a replay may still ask
    assert await kit.batch(1, epoch=6) == ahead


async def test_a_batch_that_is_not_ready_says_why(kit: Kit):
    leases = (await kit.lease(4)).groups
    await kit.report(kit.result(leases[0]))
    reply = await kit.batch(0)
    assert not reply.ready
    assert reply.reason == "Step 0 needs 2 groups; 1 are finished and 3 in work."
    assert "not the next one" in (await kit.batch(3)).reason


async def test_a_batch_waits_for_work_that_would_otherwise_come_too_late(ledger: Ledger, database: Database):
    kit = await Kit.create(ledger, RunRepository(database), groups=2, staleness=2)
    old = (await kit.lease(6)).groups  # due by step 2: fills steps 0 to 2
    await kit.report(kit.result(old[0]), kit.result(old[1]))
    await kit.commit(1, await kit.batch(0))
    new = (await kit.lease(2, version=1, worker="rollout-1")).groups  # due by step 3
    await kit.report(*(kit.result(lease, 1) for lease in new), worker="rollout-1")
    waits = await kit.batch(1)  # with the new ones in step 1, four old ones would be left for step 2 alone
    assert not waits.ready
    assert "due by step 2" in waits.reason
    await kit.report(kit.result(old[2]), kit.result(old[3]))
    assert [group.index for group in (await kit.batch(1)).groups] == [2, 3]


async def test_a_commit_is_mirrored_once_and_in_order(kit: Kit):
    await kit.fill(0)
    batch = await kit.batch(0)
    with pytest.raises(Conflict):
        await kit.ledger.mirror_commit(kit.commit_of(2, batch))
    mirrored = await kit.commit(1, batch)
    assert (mirrored.changed, mirrored.consumed, mirrored.returned, mirrored.from_log) == (True, 2, [], [])
    assert not (await kit.commit(1, batch)).changed
    audit = await kit.audit()
    assert (audit.issued, audit.consumed, audit.buffered, audit.trajectories) == (4, 2, 2, 8)


async def test_groups_that_the_commit_did_not_use_are_available_again(kit: Kit):
    leases = await kit.fill(0)
    batch = await kit.batch(0)
    others = [(lease.group_id, f"payload-{lease.group_id}-1") for lease in leases[2:]]
    mirrored = await kit.ledger.mirror_commit(
        Commit(run_id=kit.run.id, version=1, manifest="m1", epoch=3, groups=others)
    )
    assert mirrored.returned == [group.group_id for group in batch.groups]
    assert [group.group_id for group in (await kit.batch(1)).groups] == mirrored.returned
    await kit.audit()


async def test_the_log_is_right_when_the_database_was_restored_from_a_copy(kit: Kit):
    groups = [(group_id_of(kit.run.id, index), f"p{index}") for index in (3, 1)]
    mirrored = await kit.ledger.mirror_commit(
        Commit(run_id=kit.run.id, version=1, manifest="m1", epoch=3, groups=groups)
    )
    assert mirrored.from_log == [group_id for group_id, _ in groups]
    audit = await kit.audit()
    assert (audit.issued, audit.consumed, audit.pooled, audit.from_log) == (4, 2, 2, 2)
    assert [lease.index for lease in (await kit.lease(2, version=1)).groups] == [0, 2]


async def test_a_group_consumed_twice_is_found_by_the_audit(kit: Kit):
    await kit.fill(0)
    batch = await kit.batch(0)
    await kit.commit(1, batch)
    mirrored = await kit.ledger.mirror_commit(kit.commit_of(2, batch))
    assert len(mirrored.consumed_twice) == 2
    audit = await kit.ledger.audit(kit.run.id)
    assert audit.consumed_twice == 2
    assert not audit.sound


async def test_a_missing_payload_is_replaced_and_its_rollout_asked_again(kit: Kit):
    await kit.fill(0)
    first = await kit.batch(0)
    lost, kept = first.groups
    again = await kit.batch(0, missing=[lost.group_id])
    assert again.groups[0] == kept
    assert again.groups[1].index == 2
    assert await kit.batch(0) == again
    assert (await kit.report(held=[lost.group_id])).resend == [lost.group_id]
    await kit.audit()


async def test_an_expired_lease_returns_the_group_with_its_partial_tokens(kit: Kit, clock: ManualClock):
    lease = (await kit.lease(1)).groups[0]
    partial = GroupPartial(group_id=lease.group_id, attempt=1, tokens=7, payload="half", min_version=0)
    await kit.report(partial=[partial])
    clock.advance(GROUP_LEASE_S - 1)
    assert (await kit.report(partial=[partial])).refused == {}  # renewed
    clock.advance(GROUP_LEASE_S - 1)
    assert await kit.ledger.expire(kit.run.id) == []
    clock.advance(2)
    assert await kit.ledger.expire(kit.run.id) == [lease.group_id]
    again = (await kit.lease(1, worker="rollout-1")).groups[0]
    assert (again.group_id, again.attempt, again.partial, again.consume_by) == (lease.group_id, 2, "half", 1)
    late = await kit.report(kit.result(lease))
    assert list(late.refused) == [lease.group_id]
    assert (await kit.audit()).late_results == 1


async def test_a_late_result_is_taken_while_the_group_waits_in_the_pool(kit: Kit, clock: ManualClock):
    lease = (await kit.lease(1)).groups[0]
    clock.advance(GROUP_LEASE_S + 1)
    await kit.ledger.expire(kit.run.id)
    assert (await kit.report(kit.result(lease))).accepted == [lease.group_id]
    await kit.audit()


async def test_no_lease_runs_out_because_the_controller_was_away(kit: Kit, clock: ManualClock):
    await kit.lease(2)
    clock.advance(10 * GROUP_LEASE_S)
    assert await kit.ledger.extend_leases() == 2
    assert await kit.ledger.expire(kit.run.id) == []


async def test_a_lost_workers_groups_are_reassigned(kit: Kit):
    leases = (await kit.lease(2, epoch=3)).groups
    partial = GroupPartial(group_id=leases[1].group_id, attempt=1, tokens=7, payload="half", min_version=0)
    await kit.report(partial=[partial], epoch=3)
    reassigned = await kit.ledger.reassign(kit.run.id, "rollout-0", 4)
    assert reassigned.groups == [lease.group_id for lease in leases]
    assert reassigned.tokens_kept == 7
    assert (await kit.ledger.reassign(kit.run.id, "rollout-0", 4)).groups == []
    assert await kit.ledger.counts(kit.run.id) == {"pooled": 2}


async def test_a_restarted_rollout_gives_back_what_its_earlier_epoch_held(kit: Kit):
    await kit.lease(4, epoch=1)
    reply = await kit.lease(4, epoch=2)
    assert [lease.attempt for lease in reply.groups] == [2, 2, 2, 2]


async def test_a_failing_environment_is_tried_again_and_then_dropped(kit: Kit):
    for attempt in range(1, GROUP_ATTEMPTS + 1):
        lease = (await kit.lease(1)).groups[0]
        assert (lease.index, lease.attempt) == (0, attempt)
        failure = GroupFailure(group_id=lease.group_id, attempt=attempt, reason="its process died")
        await kit.report(failed=[failure, failure])
    audit = await kit.audit()
    assert (audit.dropped, audit.dropped_reasons) == (1, {"poisoned": 1})
    assert [lease.index for lease in (await kit.lease(64)).groups] == [1, 2, 3, 4]  # a new group takes its place


async def test_incomplete_or_impossible_results_are_refused(kit: Kit):
    leases = (await kit.lease(3)).groups
    whole = kit.result(leases[0])
    short = type(whole)(**{**_fields(whole), "trajectories": whole.trajectories[:1]})
    negative = kit.result(leases[1], -1)
    reply = await kit.report(short, negative)
    assert set(reply.refused) == {leases[0].group_id, leases[1].group_id}
    assert (await kit.report(kit.result(leases[2], 0, 3))).resend == [leases[2].group_id]  # a version not seen yet
    assert (await kit.report(kit.result(leases[2], 0, 1), head=1)).accepted == [leases[2].group_id]
    await kit.audit()


def _fields(message: object) -> dict[str, object]:
    return {name: getattr(message, name) for name in message.__struct_fields__}  # pyright: ignore


async def test_held_groups_are_released_once_their_step_is_committed(kit: Kit):
    leases = await kit.fill(0)
    held = [lease.group_id for lease in leases]
    before = await kit.report(held=held)
    assert (before.release, before.resend) == ([], [])
    await kit.commit(1, await kit.batch(0))
    assert (await kit.report(held=held)).release == held[:2]


async def test_a_dropped_group_keeps_its_reason(kit: Kit):
    lease = (await kit.lease(1)).groups[0]
    await kit.ledger.drop(lease.group_id, "asked for")
    assert (await kit.audit()).dropped_reasons == {"asked for": 1}
    with pytest.raises(NotFound):
        await kit.ledger.drop("none-7", "asked for")


async def test_reports_are_bounded(kit: Kit):
    failures = [GroupFailure(group_id=f"x-{i}", attempt=1, reason="") for i in range(REPORT_GROUPS_MAX + 1)]
    with pytest.raises(LimitReached):
        await kit.report(failed=failures)


async def test_rollouts_that_ask_at_once_never_share_a_group(ledger: Ledger, database: Database):
    kit = await Kit.create(ledger, RunRepository(database), groups=8, staleness=3)
    replies = await asyncio.gather(*(kit.lease(4, worker=f"rollout-{number}") for number in range(8)))
    indexes = [lease.index for reply in replies for lease in reply.groups]
    assert sorted(indexes) == list(range(32))
    results = [
        kit.report(*map(kit.result, reply.groups), worker=f"rollout-{number}") for number, reply in enumerate(replies)
    ]
    batches = await asyncio.gather(*results, *(kit.batch(0) for _ in range(3)))
    ready = [reply for reply in batches[8:] if reply.ready]
    assert all(reply == ready[0] for reply in ready)
    await kit.audit()


async def test_no_batch_behind_the_mirrored_version_is_read_for_a_lease(kit: Kit, database: Database):
    await kit.fill(0)
    await kit.commit(1, await kit.batch(0))
    async with database.write() as session:
        run = await locked_run(session, kit.run.id)
        past = await session.get(Batch, (run.id, 0))
        past.committed, past.group_ids = False, []  # it would show as a hole, were it read
        await session.flush()
        assert await places(session, run) == Places(run.groups_per_step, 1, {})
