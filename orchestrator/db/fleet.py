"""The fleet: nodes, workers, and the timeline of what each worker was doing."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from sqlalchemy import delete, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from orchestrator.db.runs import FINAL_STATES
from orchestrator.db.session import Database
from orchestrator.db.tables import Node, Run, Worker, WorkerSpan
from whimbrel.clock import Clock, SystemClock
from whimbrel.errors import Fenced, NotFound
from whimbrel.limits import SPANS_KEPT, TIMELINE_SPANS_MAX

ENDED_STATES: Final = ("exited", "lost", "stopped")
"""States of a worker in which none of its processes runs."""


class FleetRepository:
    """Rows of `nodes`, `workers`, `worker_spans` and `restarts`. Returned rows are detached copies."""

    def __init__(self, database: Database, clock: Clock | None = None) -> None:
        self._database = database
        self._clock = clock or SystemClock()

    # -- nodes

    async def nodes(self) -> list[Node]:
        """All nodes that ever joined and were not removed, by name."""
        async with self._database.read() as session:
            return list((await session.execute(select(Node).order_by(Node.id))).scalars())

    async def node(self, node_id: str) -> Node:
        """The node with this name. Raises NotFound."""
        async with self._database.read() as session:
            node = await session.get(Node, node_id)
        if node is None:
            raise _no_node(node_id)
        return node

    async def put_node(self, node_id: str, *, leader: int | None = None, **columns: Any) -> None:
        """Add a node, or set columns of one."""
        async with self._database.write(leader) as session:
            node = await session.get(Node, node_id, with_for_update=True)
            if node is None:
                node = Node(id=node_id)
                session.add(node)
            _set(node, columns)
            node.updated_at = self._clock.wall()

    async def mark_node(self, node_id: str, *, cordoned: bool | None = None, draining: bool | None = None) -> Node:
        """Set what the user wants of a node. Raises NotFound."""
        async with self._database.write() as session:
            node = await session.get(Node, node_id, with_for_update=True)
            if node is None:
                raise _no_node(node_id)
            if cordoned is not None:
                node.cordoned = cordoned
            if draining is not None:
                node.draining = draining
            node.updated_at = self._clock.wall()
            return node

    # -- workers

    async def workers(self, run_id: str | None = None) -> list[Worker]:
        """Workers of one run, or of all."""
        query = select(Worker).order_by(Worker.run_id, Worker.name)
        if run_id is not None:
            query = query.where(Worker.run_id == run_id)
        async with self._database.read() as session:
            return list((await session.execute(query)).scalars())

    async def worker(self, run_id: str, name: str) -> Worker:
        """One worker of a run. Raises NotFound."""
        async with self._database.read() as session:
            worker = await session.get(Worker, (run_id, name))
        if worker is None:
            raise NotFound(f"The run {run_id} has no worker {name}.", hint="`whimbrel run watch RUN` shows them.")
        return worker

    async def put_worker(self, run_id: str, name: str, *, leader: int | None = None, **columns: Any) -> None:
        """Add a worker, or set columns of one; the timeline follows.

        Raises:
            Fenced: `epoch` is lower than the one stored, or a newer leader is in charge.
        """
        await self.put_workers([{"run_id": run_id, "name": name, **columns}], leader=leader)

    async def put_workers(
        self, rows: Sequence[Mapping[str, Any]], *, leader: int | None = None, skip_old: bool = False
    ) -> None:
        """`put_worker` for several workers in one transaction; each row has run_id, name and the columns to set.

        Args:
            skip_old: leave out a row whose `epoch` is lower than the stored one, instead of raising Fenced. For pictures
                that were taken before a worker was placed anew.
        """
        if not rows:
            return
        now = self._clock.wall()
        async with self._database.write(leader) as session:
            for row in sorted(rows, key=lambda row: (row["run_id"], row["name"])):  # one order of locks: no deadlock
                columns = {key: value for key, value in row.items() if key not in ("run_id", "name")}
                try:
                    await self._put(session, row["run_id"], row["name"], columns, now)
                except Fenced:
                    if not skip_old:
                        raise

    async def _put(
        self, session: AsyncSession, run_id: str, name: str, columns: Mapping[str, Any], now: datetime
    ) -> None:
        worker = await session.get(Worker, (run_id, name), with_for_update=True)
        if worker is None:
            worker = Worker(run_id=run_id, name=name, role=_role(name), epoch=0, state="pending", node_id="", phase="")
            session.add(worker)
            before = None
        else:
            before = _span_key(worker)
        if columns.get("epoch", worker.epoch) < worker.epoch:
            raise Fenced(
                f"Epoch {columns['epoch']} of {name} in {run_id} is old: {worker.epoch} is recorded.",
                newest=worker.epoch,
            )
        _set(worker, columns)
        worker.updated_at = now
        after = _span_key(worker)
        if after != before:
            still_open = (WorkerSpan.run_id == run_id, WorkerSpan.worker == name, WorkerSpan.until.is_(None))
            await session.execute(update(WorkerSpan).where(*still_open).values(until=now))
            session.add(_span(worker, now))

    async def settle_ended(self, seen: Collection[str], *, leader: int | None = None) -> None:
        """Record workers of runs that are over as stopped, where nobody was there to see them end.

        Args:
            seen: runs that the control loop still looks at; it records their workers itself.
        """
        over = select(Worker.run_id, Worker.name).join(Run, Run.id == Worker.run_id)
        over = over.where(Run.state.in_(FINAL_STATES), Worker.state.not_in(ENDED_STATES))
        async with self._database.read() as session:
            found = [tuple(row) for row in await session.execute(over)]
        stopped = {"state": "stopped", "reason": "The run is over.", "phase": "", "pids": []}
        rows = [{"run_id": run_id, "name": name, **stopped} for run_id, name in found if run_id not in seen]
        await self.put_workers(rows, leader=leader)

    # -- timeline

    async def spans(
        self, run_id: str, *, since: datetime | None = None, limit: int = TIMELINE_SPANS_MAX
    ) -> list[WorkerSpan]:
        """The newest `limit` spans that are open or ended after `since`, oldest first."""
        query = select(WorkerSpan).where(WorkerSpan.run_id == run_id).order_by(WorkerSpan.id.desc()).limit(limit)
        if since is not None:
            query = query.where(or_(WorkerSpan.until.is_(None), WorkerSpan.until > since))
        async with self._database.read() as session:
            return list((await session.execute(query)).scalars())[::-1]

    async def prune_spans(self, run_id: str, keep: int = SPANS_KEPT) -> None:
        """Forget all ended spans of a run but the newest `keep`."""
        newest = select(WorkerSpan.id).where(WorkerSpan.run_id == run_id).order_by(WorkerSpan.id.desc())
        async with self._database.write() as session:
            edge = (await session.execute(newest.offset(keep).limit(1))).scalar_one_or_none()
            if edge is not None:
                old = (WorkerSpan.run_id == run_id, WorkerSpan.id <= edge, WorkerSpan.until.is_not(None))
                await session.execute(delete(WorkerSpan).where(*old))


def _role(name: str) -> str:
    return "trainer" if name == "trainer" else "rollout"


def _set(row: Node | Worker, columns: Mapping[str, Any]) -> None:
    for name, value in columns.items():
        assert name in row.__table__.columns, f"{row.__tablename__} has no column {name}"
        setattr(row, name, value)


def _span_key(worker: Worker) -> tuple[str, str, str, int]:
    return worker.state, worker.phase, worker.node_id, worker.epoch


def _span(worker: Worker, now: datetime) -> WorkerSpan:
    return WorkerSpan(
        run_id=worker.run_id,
        worker=worker.name,
        role=worker.role,
        node_id=worker.node_id,
        epoch=worker.epoch,
        state=worker.state,
        phase=worker.phase,
        since=now,
    )


def _no_node(node_id: str) -> NotFound:
    return NotFound(f"There is no node {node_id}.", hint="`whimbrel node ls` lists them.", node=node_id)
