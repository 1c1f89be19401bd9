"""Who leads: etcd says it, the database is told, and a term begins.

While etcd is away nobody can be elected. The last leader then goes on serving work from the database, whose row still
names its epoch, and decides nothing; a newer leader would have changed that row first.
"""

from __future__ import annotations

import datetime as dt
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import func, or_, select

from orchestrator.core.lifecycle import TERMINAL
from orchestrator.db import Database, IncidentRepository, Ledger, tables
from whimbrel.clock import Clock
from whimbrel.coordination import Election
from whimbrel.errors import Fenced
from whimbrel.limits import LEADER_LEASE_TTL_S, STORE_HOLD_S
from whimbrel.wire.cluster import Leader


def holder_name() -> str:
    """host:pid:nonce, as the election wants it: a process that is gone can be told from one that is silent."""
    return f"{os.uname().nodename}:{os.getpid()}:{secrets.token_hex(4)}"


@dataclass(frozen=True, slots=True)
class Term:
    """A new term of leadership and whom it follows."""

    epoch: int
    predecessor: str
    """Holder of the term before, or an empty text."""


class Leadership:
    """This process's part in the election."""

    def __init__(
        self, endpoints: Sequence[str], url: str, database: Database, ledger: Ledger, clock: Clock, holder: str
    ) -> None:
        self.holder = holder
        self.leader: Leader | None = None
        """Whoever leads, as far as known."""
        self.epoch = 0
        """Of the term that this process serves; 0 while another leads."""
        self.election = Election(endpoints, holder, url)
        self._url = url
        self._database = database
        self._ledger = ledger
        self._incidents = IncidentRepository(database, clock)
        self._clock = clock

    @property
    def leading(self) -> bool:
        """Whether etcd's key is certainly held now."""
        return 0 < self.epoch == self.election.epoch and self.election.is_leader()

    async def campaign(self) -> Term | None:
        """Try to lead. Returns the term if a new one began now.

        Raises:
            Unreachable: etcd or the database does not answer.
            Fenced: the database has seen a newer epoch than etcd gives: etcd lost its history, and a person must look.
        """
        if self.leading:
            return None
        if not await self.election.campaign_once():
            self.step_down()
            self.leader = await self.election.current()
            return None
        epoch = self.election.epoch
        if epoch == self.epoch:
            return None
        predecessor = await self._predecessor()
        await self._take(epoch)
        # Leases of groups ran on while nobody could renew them; none may be lost for that.
        await self._ledger.extend_leases(leader=epoch)
        self.epoch = epoch
        self.leader = Leader(holder=self.holder, url=self._url)
        return Term(epoch, predecessor)

    async def _take(self, epoch: int) -> None:
        try:
            await self._database.take_leadership(epoch, self.holder)
        except Fenced as error:
            if not self.election.is_leader():
                raise  # another one was elected meanwhile, and was faster
            raise Fenced(
                f"etcd's data is not what this database was used with: epoch {error.details['newest']} led here, and etcd "
                f"now counts from {epoch}. Nothing is decided, so that nothing is trained twice.",
                hint="Put etcd's data back. If it is lost, put the database aside too and start new runs.",
                epoch=epoch,
            ) from error

    def step_down(self) -> None:
        """Another controller leads, or may."""
        self.epoch = 0
        self.leader = None

    async def record_failover(self, term: Term) -> None:
        """Open an incident if leadership was lost while runs were active.

        A term that begins after an outage of etcd is no failure of a controller; that outage has its own record.
        """
        if not term.predecessor:
            return
        async with self._database.read() as session:
            table = tables.Incident
            of_outage = table.state == "open"
            if term.predecessor == self.holder:
                # Leases are restored with the store, and its own may still run out a little after it answers again.
                lately = self._clock.wall() - dt.timedelta(seconds=STORE_HOLD_S + LEADER_LEASE_TTL_S)
                of_outage = or_(of_outage, table.recovered_at > lately)
            outages = select(func.count()).select_from(table).where(table.kind == "store_outage", of_outage)
            if await session.scalar(outages):
                return
            started = tables.Run.state.not_in([*TERMINAL, "pending"])
            active = await session.scalar(select(func.count()).select_from(tables.Run).where(started))
            last_sign: dt.datetime | None = await session.scalar(select(func.max(tables.Worker.last_progress_at)))
        if not active:
            return
        now = self._clock.wall()
        taken = "it leads again" if term.predecessor == self.holder else f"{self.holder} took over"
        incident = await self._incidents.open(
            run_id=None,
            kind="controller_failover",
            subject="controller",
            summary=f"Controller {term.predecessor} stopped leading; {taken}. No worker was restarted for it.",
            severity="warning",
            cause=f"Controller {term.predecessor} stopped leading.",
            failed_at=min(last_sign, now) if last_sign is not None else now,
            detected_at=now,
            leader=term.epoch,
        )
        await self._incidents.decide(incident.id, "take over", f"{self.holder} was elected.", at=now, leader=term.epoch)

    async def end_failovers(self) -> None:
        """The first pass of the new term is through: the work API answers again.

        That also ends what an earlier term left open because it was lost before its own first pass was through.
        """
        for incident in await self._incidents.list(open=True):
            if incident.kind == "controller_failover":
                await self._incidents.close(incident.id, recovered_at=self._clock.wall(), leader=self.epoch)

    async def close(self) -> None:
        """Resign, so that a standby need not wait for the lease to run out."""
        self.epoch = 0
        await self.election.close()

    async def _predecessor(self) -> str:
        async with self._database.read() as session:
            row = await session.scalar(select(tables.Leadership))
            return row.holder if row is not None else ""
