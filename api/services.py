"""What request handlers need, put together once by the composition root and found at `request.app.state.services`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from orchestrator.db import (
    Database,
    EventLog,
    FleetRepository,
    IncidentRepository,
    Ledger,
    RunRepository,
    VersionRepository,
)
from whimbrel.clock import Clock, SystemClock
from whimbrel.settings import Settings

if TYPE_CHECKING:
    from orchestrator.control import Controller


@dataclass(frozen=True)
class Services:
    """The controller's parts, for the API."""

    settings: Settings
    database: Database
    controller: Controller
    ledger: Ledger
    runs: RunRepository
    fleet: FleetRepository
    versions: VersionRepository
    incidents: IncidentRepository
    events: EventLog
    cluster_token: str = field(repr=False)
    """Shared by controller, agents and workers."""
    admin_token: str = field(repr=False)
    """Of the user: API, CLI and dashboard."""

    @classmethod
    def build(
        cls,
        settings: Settings,
        database: Database,
        controller: Controller,
        clock: Clock | None = None,
        *,
        events: EventLog | None = None,
    ) -> Services:
        """All repositories over one database; the tokens from the settings or their files.

        `events` is the log that the controller writes to, so that its readers in this process wake at once.
        """
        clock = clock or SystemClock()
        return cls(
            settings=settings,
            database=database,
            controller=controller,
            ledger=Ledger(database, clock),
            runs=RunRepository(database, clock),
            fleet=FleetRepository(database, clock),
            versions=VersionRepository(database, clock),
            incidents=IncidentRepository(database, clock),
            events=events or EventLog(database, clock),
            cluster_token=settings.read_cluster_token(create=True),
            admin_token=settings.read_admin_token(create=True),
        )
