"""Committed versions as mirrored from the log, and when rollouts took them over."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import delete, select, update

from orchestrator.db.session import Database
from orchestrator.db.tables import Apply, Version
from whimbrel.clock import Clock, SystemClock
from whimbrel.errors import NotFound
from whimbrel.limits import APPLIES_KEPT, METRIC_POINTS_MAX, PAGE_DEFAULT


class VersionRepository:
    """Rows of `versions` and `applies`. Versions are added by `Ledger.mirror_commit`, with what they consumed."""

    def __init__(self, database: Database, clock: Clock | None = None) -> None:
        self._database = database
        self._clock = clock or SystemClock()

    async def get(self, run_id: str, version: int) -> Version:
        """One version of a run. Raises NotFound."""
        async with self._database.read() as session:
            row = await session.get(Version, (run_id, version))
        if row is None:
            raise NotFound(
                f"The run {run_id} has no version {version}.", hint="`whimbrel checkpoint ls RUN` lists them."
            )
        return row

    async def list(self, run_id: str, *, limit: int = PAGE_DEFAULT, before: int | None = None) -> Sequence[Version]:
        """Versions below `before`, newest first."""
        query = select(Version).where(Version.run_id == run_id).order_by(Version.version.desc()).limit(limit)
        if before is not None:
            query = query.where(Version.version < before)
        async with self._database.read() as session:
            return list((await session.execute(query)).scalars())

    async def latest(self, run_id: str) -> Version | None:
        """The newest version of a run."""
        return next(iter(await self.list(run_id, limit=1)), None)

    async def series(
        self, run_id: str, *, after: int = -1, limit: int = METRIC_POINTS_MAX
    ) -> Sequence[tuple[int, float | None, dict[str, Any]]]:
        """(version, step_seconds, metrics) of the newest `limit` versions above `after`, ascending."""
        query = select(Version.version, Version.step_seconds, Version.metrics)
        query = query.where(Version.run_id == run_id, Version.version > after)
        async with self._database.read() as session:
            rows = (await session.execute(query.order_by(Version.version.desc()).limit(limit))).all()
            return [(version, seconds, metrics) for version, seconds, metrics in rows][::-1]

    async def mark_snapshot(self, run_id: str, version: int, digest: str, *, leader: int | None = None) -> None:
        """Set the snapshot at a version; an empty digest says that retention deleted it."""
        chosen = (Version.run_id == run_id, Version.version == version)
        async with self._database.write(leader) as session:
            await session.execute(update(Version).where(*chosen).values(snapshot=digest))

    async def add_apply(
        self,
        run_id: str,
        worker: str,
        version: int,
        *,
        applied_at: datetime | None = None,
        apply_ms: float | None = None,
        pause_ms: float | None = None,
        fetch_ms: float | None = None,
        leader: int | None = None,
    ) -> None:
        """Record that a rollout generates with `version` now; the oldest records of the run give way."""
        row = Apply(
            run_id=run_id,
            worker=worker,
            version=version,
            applied_at=applied_at or self._clock.wall(),
            apply_ms=apply_ms,
            pause_ms=pause_ms,
            fetch_ms=fetch_ms,
        )
        newest = select(Apply.id).where(Apply.run_id == run_id).order_by(Apply.id.desc())
        async with self._database.write(leader) as session:
            session.add(row)
            await session.flush()
            edge = (await session.execute(newest.offset(APPLIES_KEPT).limit(1))).scalar_one_or_none()
            if edge is not None:
                await session.execute(delete(Apply).where(Apply.run_id == run_id, Apply.id <= edge))
