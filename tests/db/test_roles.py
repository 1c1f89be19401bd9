"""Law 5 in the ledger: either side of a run goes on without the other, as far as the staleness bound reaches."""

from __future__ import annotations

from orchestrator.db import Database, Ledger, RunRepository
from tests.db.ledger_kit import Kit
from whimbrel.clock import ManualClock


async def test_law_5_without_a_trainer_rollouts_go_on_up_to_the_staleness_bound(ledger: Ledger, database: Database):
    kit = await Kit.create(ledger, RunRepository(database), groups=2, staleness=3)
    finished = 0
    while leases := (await kit.lease(1)).groups:
        reply = await kit.report(kit.result(leases[0]))
        assert reply.accepted == [leases[0].group_id]
        finished += 1
    assert finished == (0 + 1 + 3) * 2
    assert "Staleness bound" in (await kit.lease(1)).reason
    assert (await kit.audit()).buffered == finished


async def test_law_5_without_rollouts_the_trainer_uses_what_is_buffered(
    ledger: Ledger, database: Database, clock: ManualClock
):
    kit = await Kit.create(ledger, RunRepository(database), groups=2, staleness=3)
    await kit.fill()
    for worker in ("rollout-0", "rollout-1"):
        await ledger.reassign(kit.run.id, worker, 2)
    clock.advance(3600)
    await ledger.expire(kit.run.id)
    for step in range(4):
        batch = await kit.batch(step)
        assert batch.ready, batch.reason
        assert len(batch.groups) == 2
        await kit.commit(step + 1, batch)
    last = await kit.batch(4)
    assert not last.ready
    assert "needs 2 groups; 0 are finished" in last.reason
    assert (await kit.audit()).consumed == 8
