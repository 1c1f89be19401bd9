"""Proof that the ledger's laws hold for a run, from its rows."""

from __future__ import annotations

from dataclasses import dataclass, field

from sqlalchemy import case, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from orchestrator.db.tables import PromptGroup, Run, Trajectory
from whimbrel.errors import NotFound


@dataclass(frozen=True, kw_only=True)
class Audit:
    """The balance of a run's prompt groups, and how often a law was broken (never, in a sound ledger)."""

    run_id: str
    head_version: int
    issued: int
    """Groups that were ever made; the others say where they are now."""
    consumed: int = 0
    batched: int = 0
    buffered: int = 0
    leased: int = 0
    pooled: int = 0
    dropped: int = 0
    dropped_reasons: dict[str, int] = field(default_factory=dict)
    trajectories: int = 0
    trajectories_lost: int = 0
    """Trajectories that consumed or finished groups should have and do not."""
    consumed_twice: int = 0
    """Groups that more than one committed step trained on."""
    too_stale: int = 0
    """Consumed groups with a token older than the bound, or newer than the version that trained on it."""
    max_staleness: int = 0
    """Largest staleness of any consumed token."""
    late_results: int = 0
    """Results that were refused because their lease was lost."""
    from_log: int = 0
    """Groups known only from the log, after the database was restored from a copy."""

    @property
    def balance(self) -> int:
        """Groups unaccounted for."""
        placed = self.consumed + self.batched + self.buffered + self.leased + self.pooled + self.dropped
        return self.issued - placed

    @property
    def balanced(self) -> bool:
        return self.balance == 0

    @property
    def sound(self) -> bool:
        """Every law holds."""
        return self.balanced and not (self.trajectories_lost or self.consumed_twice or self.too_stale)


async def audit_run(session: AsyncSession, run_id: str) -> Audit:
    """Add up the rows of a run. Raises NotFound."""
    run = await session.get(Run, run_id)
    if run is None:
        raise NotFound(f"There is no run {run_id}.", run=run_id)
    states = ("consumed", "batched", "buffered", "leased", "pooled", "dropped")
    consumed = (PromptGroup.state == "consumed") & PromptGroup.from_log.is_(False)
    age = PromptGroup.step - PromptGroup.min_version
    wrong_age = consumed & or_(age > run.max_versions, PromptGroup.max_version > PromptGroup.step)
    finished = consumed | PromptGroup.state.in_(("buffered", "batched"))
    query = select(
        *(_count(PromptGroup.state == state).label(state) for state in states),
        _count(PromptGroup.consumed_count > 1).label("consumed_twice"),
        _count(wrong_age).label("too_stale"),
        _count(PromptGroup.from_log).label("from_log"),
        func.coalesce(func.max(case((consumed, age))), 0).label("max_staleness"),
        (_count(finished) * run.group_size).label("expected"),
    ).where(PromptGroup.run_id == run_id)
    balance = dict((await session.execute(query)).one()._mapping)
    expected = balance.pop("expected")
    owned = select(func.count()).select_from(Trajectory).join(PromptGroup, PromptGroup.id == Trajectory.group_id)
    trajectories = await session.execute(owned.where(PromptGroup.run_id == run_id, finished))
    found = trajectories.scalar_one()
    reason = func.substr(PromptGroup.reason, 1, 60)
    dropped = select(reason, func.count()).where(PromptGroup.run_id == run_id, PromptGroup.state == "dropped")
    reasons = (await session.execute(dropped.group_by(reason))).all()
    return Audit(
        run_id=run_id,
        head_version=run.head_version,
        issued=run.next_index,
        late_results=run.late_results,
        trajectories=found,
        trajectories_lost=max(0, expected - found),
        dropped_reasons={text.partition(":")[0]: count for text, count in reasons},
        **balance,
    )


def _count(condition):
    return func.coalesce(func.sum(case((condition, 1), else_=0)), 0)
