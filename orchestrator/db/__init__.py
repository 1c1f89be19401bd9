"""The controller's database: tables, sessions, the ledger and the other repositories."""

from orchestrator.db.events import EventLog
from orchestrator.db.fleet import FleetRepository
from orchestrator.db.incidents import IncidentRepository
from orchestrator.db.leadership import fenced
from orchestrator.db.ledger import Audit, Commit, Ledger, Mirrored, Reassigned
from orchestrator.db.runs import FINAL_STATES, RunRepository
from orchestrator.db.session import Database
from orchestrator.db.versions import VersionRepository

__all__ = [
    "FINAL_STATES",
    "Audit",
    "Commit",
    "Database",
    "EventLog",
    "FleetRepository",
    "IncidentRepository",
    "Ledger",
    "Mirrored",
    "Reassigned",
    "RunRepository",
    "VersionRepository",
    "fenced",
]
