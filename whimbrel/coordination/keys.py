"""Names of the keys in etcd. One file, so that nobody spells one by hand."""

from __future__ import annotations

from typing import Final

PREFIX: Final = "/whimbrel/1/"
LEADER: Final = PREFIX + "leader"
NODES: Final = PREFIX + "nodes/"
WORKERS: Final = PREFIX + "workers/"
OWNERS: Final = PREFIX + "owners/"
HEADS: Final = PREFIX + "heads/"
SPECS: Final = PREFIX + "specs/"


def node(node_id: str) -> str:
    """The node's registration, under the agent's lease."""
    return f"{NODES}{node_id}"


def worker(run_id: str, name: str) -> str:
    """The worker's sign of life, under the worker's own lease."""
    return f"{WORKERS}{run_id}/{name}"


def owner(run_id: str, name: str) -> str:
    """Who plays this worker's part; its mod_revision is the fencing epoch."""
    return f"{OWNERS}{run_id}/{name}"


def head(run_id: str) -> str:
    """The newest committed version of the run."""
    return f"{HEADS}{run_id}"


def spec(run_id: str) -> str:
    """The run's spec as JSON, for agents; written once, before the first owner."""
    return f"{SPECS}{run_id}"
