"""Short words for the ledger's messages."""

from __future__ import annotations

from orchestrator.db import Commit, FleetRepository, Ledger, RunRepository
from orchestrator.db.tables import Run
from whimbrel.spec import RunSpec, parse_run_spec
from whimbrel.wire.work import (
    BatchReply,
    BatchRequest,
    Caller,
    GroupFailure,
    GroupLease,
    GroupPartial,
    GroupResult,
    LeaseReply,
    LeaseRequest,
    ReportReply,
    ReportRequest,
    TrajectoryMeta,
)


def spec(name: str = "demo", *, groups: int = 2, size: int = 2, staleness: int = 1, steps: int = 100) -> RunSpec:
    """A run with `groups` groups of `size` samples a step."""
    return parse_run_spec(
        {
            "name": name,
            "model": "builtin:arithmetic",
            "batch_size": groups * size,
            "max_steps": steps,
            "algorithm": {"group_size": size},
            "staleness": {"max_versions": staleness},
        }
    )


class Kit:
    """One run's ledger, spoken to as its workers would."""

    def __init__(self, ledger: Ledger, run: Run) -> None:
        self.ledger, self.run = ledger, run

    @classmethod
    async def create(cls, ledger: Ledger, runs: RunRepository, **options: int) -> Kit:
        """A new run with version 0 committed."""
        kit = cls(ledger, await runs.create(spec(**options)))
        await kit.commit(0)
        return kit

    def caller(self, worker: str = "rollout-0", epoch: int = 1) -> Caller:
        return Caller(run_id=self.run.id, worker=worker, epoch=epoch)

    async def lease(
        self, capacity: int = 64, *, version: int = 0, worker: str = "rollout-0", epoch: int = 1
    ) -> LeaseReply:
        request = LeaseRequest(caller=self.caller(worker, epoch), policy_version=version, capacity=capacity)
        return await self.ledger.lease(request)

    def result(self, lease: GroupLease, oldest: int = 0, newest: int | None = None, payload: str = "") -> GroupResult:
        newest = oldest if newest is None else newest
        samples = [
            TrajectoryMeta(
                sample=sample, tokens=10, reward=1.0, min_version=oldest, max_version=newest, finish_reason="stop"
            )
            for sample in range(self.run.group_size)
        ]
        payload = payload or f"payload-{lease.group_id}-{lease.attempt}"
        return GroupResult(
            group_id=lease.group_id, attempt=lease.attempt, payload=payload, payload_bytes=100, trajectories=samples
        )

    async def report(
        self,
        *finished: GroupResult,
        partial: list[GroupPartial] | None = None,
        failed: list[GroupFailure] | None = None,
        held: list[str] | None = None,
        worker: str = "rollout-0",
        epoch: int = 1,
        head: int | None = None,
    ) -> ReportReply:
        request = ReportRequest(
            caller=self.caller(worker, epoch),
            finished=list(finished),
            partial=partial or [],
            failed=failed or [],
            held=held or [],
        )
        return await self.ledger.report(request, head_version=head)

    async def fill(self, version: int = 0) -> list[GroupLease]:
        """Lease and finish all that the bound allows."""
        leases = (await self.lease(version=version)).groups
        await self.report(*(self.result(lease, version) for lease in leases))
        return leases

    async def batch(self, step: int, *, missing: list[str] | None = None, epoch: int = 1) -> BatchReply:
        request = BatchRequest(caller=self.caller("trainer", epoch), step=step, missing=missing or [])
        return await self.ledger.batch(request)

    def commit_of(self, version: int, reply: BatchReply | None = None) -> Commit:
        groups = [(group.group_id, group.payload) for group in reply.groups] if reply else []
        return Commit(run_id=self.run.id, version=version, manifest=f"manifest-{version}", epoch=1, groups=groups)

    async def commit(self, version: int, reply: BatchReply | None = None):
        return await self.ledger.mirror_commit(self.commit_of(version, reply))

    async def put_epoch(self, worker: str, epoch: int) -> None:
        """The control loop writes down a new owner."""
        fleet = FleetRepository(self.ledger._database)
        await fleet.put_worker(self.run.id, worker, epoch=epoch, state="running")

    async def audit(self):
        """The audit, after checking that it is sound."""
        audit = await self.ledger.audit(self.run.id)
        assert audit.sound, audit
        return audit
