"""The agent of one node: joins, leases, supervises its workers, reports. See `daemon.py` for the loop."""

from agents.daemon.program import main

__all__ = ["main"]
