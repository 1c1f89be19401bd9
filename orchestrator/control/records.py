"""What the database knows that a decision needs: runs, nodes, open incidents, recent failures. Reads only."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from typing import cast

from sqlalchemy import or_, select

from orchestrator.core.lifecycle import TERMINAL
from orchestrator.core.world import Desired, NodeState, RunState
from orchestrator.db import Database, tables
from whimbrel.limits import ENDED_RUN_SHOWN_S, RESTART_WINDOW_S
from whimbrel.spec import RunSpec, parse_run_spec


@dataclass(frozen=True, slots=True)
class NodeRow:
    node_id: str
    state: NodeState
    slots: int
    cordoned: bool
    draining: bool
    address: str = ""
    incarnation: str = ""


@dataclass(frozen=True, slots=True)
class RunRow:
    run_id: str
    name: str
    spec: RunSpec
    desired: Desired
    state: RunState
    reason: str
    generation: int
    observed_generation: int
    head_version: int
    mirrored_version: int


@dataclass(frozen=True, slots=True)
class IncidentRow:
    incident_id: str
    run_id: str
    kind: str
    worker: str
    node_id: str
    epoch: int
    detected_at: dt.datetime
    decided_at: dt.datetime | None = None
    groups_reassigned: int | None = None


@dataclass(frozen=True, slots=True)
class FailureRow:
    run_id: str
    worker: str
    node_id: str
    epoch: int
    kind: str
    at: dt.datetime
    charged: bool
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Known:
    """One consistent reading. `read_at` is the wall time that its ages count from."""

    read_at: dt.datetime
    runs: tuple[RunRow, ...] = ()
    nodes: tuple[NodeRow, ...] = ()
    open_incidents: tuple[IncidentRow, ...] = ()
    failures: tuple[FailureRow, ...] = ()


class Records:
    """Reads for one pass of the loop. A run's spec is parsed once."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._specs: dict[str, RunSpec] = {}

    async def load(self, read_at: dt.datetime, owned_runs: set[str]) -> Known:
        """Everything that a decision needs.

        Args:
            read_at: now, in UTC.
            owned_runs: runs that still have a running owner; they are read even when they are over.
        """
        async with self._database.read() as session:
            # A run that has just ended is looked at a little longer, so that the end of its workers is recorded.
            lately = read_at - dt.timedelta(seconds=ENDED_RUN_SHOWN_S)
            wanted = or_(
                tables.Run.state.not_in(TERMINAL), tables.Run.id.in_(owned_runs), tables.Run.finished_at >= lately
            )
            runs = (await session.scalars(select(tables.Run).where(wanted).order_by(tables.Run.id))).all()
            nodes = (await session.scalars(select(tables.Node).order_by(tables.Node.id))).all()
            is_open = tables.Incident.state == "open"
            incidents = (
                await session.scalars(select(tables.Incident).where(is_open).order_by(tables.Incident.id))
            ).all()
            since = read_at - dt.timedelta(seconds=RESTART_WINDOW_S)
            recent = select(tables.Restart).where(tables.Restart.at >= since).order_by(tables.Restart.id)
            failures = (await session.scalars(recent)).all()
            return Known(
                read_at=read_at,
                runs=tuple(self._run(row) for row in runs),
                nodes=tuple(_node(row) for row in nodes),
                open_incidents=tuple(_incident(row) for row in incidents),
                failures=tuple(_failure(row) for row in failures),
            )

    def _run(self, row: tables.Run) -> RunRow:
        spec = self._specs.get(row.id)
        if spec is None:
            spec = self._specs[row.id] = parse_run_spec(row.spec, source=f"the stored spec of {row.name}")
        return RunRow(
            run_id=row.id,
            name=row.name,
            spec=spec,
            desired=cast("Desired", row.desired_state),
            state=cast("RunState", row.state),
            reason=row.reason,
            generation=row.generation,
            observed_generation=row.observed_generation,
            head_version=row.head_version,
            mirrored_version=row.mirrored_version,
        )


def _node(row: tables.Node) -> NodeRow:
    slots = int(row.resources.get("slots", 0))
    return NodeRow(
        row.id, cast("NodeState", row.state), slots, row.cordoned, row.draining, row.address, row.incarnation
    )


def _incident(row: tables.Incident) -> IncidentRow:
    groups = row.cost.get("groups_reassigned")
    return IncidentRow(
        incident_id=row.id,
        run_id=row.run_id or "",
        kind=row.kind,
        worker=row.worker,
        node_id=row.node_id,
        epoch=row.epoch,
        detected_at=row.detected_at,
        decided_at=row.decided_at,
        groups_reassigned=groups if isinstance(groups, int) else None,
    )


def _failure(row: tables.Restart) -> FailureRow:
    return FailureRow(row.run_id, row.worker, row.node_id, row.epoch, row.kind, row.at, row.charged, row.fingerprint)
