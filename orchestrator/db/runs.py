"""Runs: what users want and what the control loop found. Also the answers kept for idempotency keys."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

from sqlalchemy import delete, func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from orchestrator.db.session import Database
from orchestrator.db.tables import IdempotencyKey, Run
from whimbrel.clock import Clock, SystemClock
from whimbrel.errors import Conflict, NotFound
from whimbrel.ids import new_id
from whimbrel.limits import PAGE_DEFAULT
from whimbrel.spec import RunSpec

FINAL_STATES: Final = frozenset({"completed", "failed", "stopped"})


class RunRepository:
    """Rows of `runs`. Returned rows are detached copies."""

    def __init__(self, database: Database, clock: Clock | None = None) -> None:
        self._database = database
        self._clock = clock or SystemClock()

    async def create(self, spec: RunSpec, *, desired: str = "running") -> Run:
        """Add a run in state `pending`.

        Raises:
            Conflict: an unfinished run has this name.
        """
        now = self._clock.wall()
        run = Run(
            id=new_id("run"),
            name=spec.name,
            spec=spec.model_dump(mode="json"),
            desired_state=desired,
            group_size=spec.algorithm.group_size,
            groups_per_step=spec.groups_per_step,
            max_versions=spec.staleness.max_versions,
            max_steps=spec.max_steps,
            created_at=now,
            updated_at=now,
        )
        async with self._database.write() as session:
            unfinished = select(Run.id).where(Run.name == spec.name, Run.state.not_in(FINAL_STATES)).limit(1)
            other = (await session.execute(unfinished)).scalar_one_or_none()
            if other is not None:
                raise Conflict(
                    f"The run {spec.name} ({other}) is not finished.",
                    hint="Stop it first, or give the new run another name.",
                    run_id=other,
                )
            session.add(run)
        return run

    async def get(self, run_id: str) -> Run:
        """The run with this id. Raises NotFound."""
        async with self._database.read() as session:
            run = await session.get(Run, run_id)
        if run is None:
            raise _no_run(run_id)
        return run

    async def resolve(self, reference: str) -> Run:
        """The run with this id, or the newest with this name. Raises NotFound."""
        query = select(Run).where((Run.id == reference) | (Run.name == reference)).order_by(Run.id.desc()).limit(1)
        async with self._database.read() as session:
            run = (await session.execute(query)).scalar_one_or_none()
        if run is None:
            raise _no_run(reference)
        return run

    async def list(
        self, *, state: str | None = None, limit: int = PAGE_DEFAULT, before: str | None = None
    ) -> Sequence[Run]:
        """Runs, newest first; `before` is the id of the last run of the previous page."""
        query = select(Run).order_by(Run.id.desc()).limit(limit)
        if state is not None:
            query = query.where(Run.state == state)
        if before is not None:
            query = query.where(Run.id < before)
        async with self._database.read() as session:
            return list((await session.execute(query)).scalars())

    async def active(self) -> Sequence[Run]:
        """Runs in a state that is not final, oldest first."""
        query = select(Run).where(Run.state.not_in(FINAL_STATES)).order_by(Run.id)
        async with self._database.read() as session:
            return list((await session.execute(query)).scalars())

    async def want(self, run_id: str, desired: str) -> tuple[Run, bool]:
        """Change what is desired (running, paused, stopped); says whether that was a change.

        Raises:
            NotFound: no such run.
            Conflict: the run is finished, and not in the way that is asked for.
        """
        async with self._database.write() as session:
            run = await locked_run(session, run_id)
            if run.desired_state == desired or (run.state == "stopped" and desired == "stopped"):
                return run, False
            if run.state in FINAL_STATES:
                raise Conflict(
                    f"The run {run.name} is {run.state}; it cannot be {desired} any more.",
                    hint="Start a new run from the same file.",
                    run_id=run_id,
                )
            run.desired_state = desired
            run.generation += 1
            run.updated_at = self._clock.wall()
            return run, True

    async def update(self, run_id: str, *, leader: int | None = None, **columns: Any) -> None:
        """Set columns of a run.

        Raises:
            NotFound: no such run.
            Conflict: the run is in a final state and the change would leave it.
            Fenced: a newer leader is in charge.
        """
        async with self._database.write(leader) as session:
            run = await locked_run(session, run_id)
            state = columns.get("state", run.state)
            if run.state in FINAL_STATES and state != run.state:
                raise Conflict(f"The run {run.name} is {run.state} and stays so; it cannot become {state}.")
            for name, value in columns.items():
                assert name in Run.__table__.columns, f"runs has no column {name}"
                setattr(run, name, value)
            run.updated_at = self._clock.wall()

    async def add_time(
        self, run_id: str, *, running_s: float, unavailable_s: float = 0.0, leader: int | None = None
    ) -> None:
        """Add to the figures of the effective training time ratio, both in seconds."""
        assert 0 <= unavailable_s <= running_s, "a trainer is not away for longer than time passed"
        change = {Run.running_s: Run.running_s + running_s, Run.unavailable_s: Run.unavailable_s + unavailable_s}
        async with self._database.write(leader) as session:
            await session.execute(update(Run).where(Run.id == run_id).values(change))

    async def delete(self, run_id: str) -> None:
        """Remove a finished run with everything the database has of it. Raises NotFound, Conflict."""
        async with self._database.write() as session:
            run = await locked_run(session, run_id)
            if run.state not in FINAL_STATES:
                raise Conflict(f"The run {run.name} is {run.state}.", hint="Stop it before deleting it.")
            await session.execute(delete(Run).where(Run.id == run_id))

    async def count(self) -> dict[str, int]:
        """Runs by state."""
        query = select(Run.state, func.count()).group_by(Run.state)
        async with self._database.read() as session:
            return dict((await session.execute(query)).all())

    async def remember(self, key: str, request_digest: str, status: int, body: Any, headers: Any) -> None:
        """Keep the answer to a request with an Idempotency-Key; the first answer stays."""
        async with self._database.write() as session:
            if await session.get(IdempotencyKey, key) is None:
                now = self._clock.wall()
                session.add(
                    IdempotencyKey(
                        key=key,
                        request_digest=request_digest,
                        status=status,
                        body=body,
                        headers=headers,
                        created_at=now,
                    )
                )

    async def recall(self, key: str) -> IdempotencyKey | None:
        """The answer kept for a key."""
        async with self._database.read() as session:
            return await session.get(IdempotencyKey, key)

    async def prune_keys(self, before: datetime) -> None:
        """Forget answers older than `before`."""
        async with self._database.write() as session:
            await session.execute(delete(IdempotencyKey).where(IdempotencyKey.created_at < before))


async def locked_run(session: AsyncSession, run_id: str) -> Run:
    """The run's row, locked to the end of the transaction: whoever changes a run's ledger takes this first.

    Raises:
        NotFound: no such run.
    """
    query = select(Run).where(Run.id == run_id).with_for_update().execution_options(populate_existing=True)
    run = (await session.execute(query)).scalar_one_or_none()
    if run is None:
        raise _no_run(run_id)
    return run


def _no_run(reference: str) -> NotFound:
    return NotFound(f"There is no run {reference}.", hint="`whimbrel run ls` lists them.", run=reference)
