"""Values of the keys in etcd: who is here, who owns what, and where each run's head is."""

from __future__ import annotations

from typing import Literal

import msgspec

from whimbrel.wire.codec import PROTOCOL

Role = Literal["trainer", "rollout"]


class Resources(msgspec.Struct, frozen=True, kw_only=True):
    """What a machine has."""

    cpus: int
    memory_bytes: int
    gpus: int = 0
    gpu_name: str = ""
    slots: int = 4
    """Workers that this node takes at most."""


class NodeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`nodes/NODE`: written by the agent under its own lease, only when something changes."""

    node_id: str
    """The node's name: stable over restarts of its agent, unique in the cluster."""
    incarnation: str
    """New for each start of the agent; `inc_…`."""
    address: str
    """host:port of the agent's chunk server, which also answers probes and log reads."""
    resources: Resources
    region: str = "local"
    pid: int = 0
    started_at: str = ""
    protocol: int = PROTOCOL
    draining: bool = False


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`workers/RUN/WORKER`: written by the worker (rank 0) itself under its own lease."""

    run_id: str
    worker: str
    role: Role
    epoch: int
    node_id: str
    pid: int
    started_at: str = ""


class Ownership(msgspec.Struct, frozen=True, kw_only=True):
    """`owners/RUN/WORKER`: who plays this worker's part now. Written only by the leading controller, never deleted.

    The key's mod_revision is the fencing epoch. `state` is what the owner shall do; `stopped` means that nobody owns it.
    """

    run_id: str
    worker: str
    role: Role
    node_id: str
    state: Literal["running", "stopped"]
    reason: str = ""
    start: int = 0
    """Counts the starts of this worker within its run, from 1."""


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """`heads/RUN`: the newest committed version. Written only in the commit transaction (law 1)."""

    run_id: str
    version: int
    manifest: str
    """Digest of the version's manifest."""
    epoch: int
    """Fencing epoch of the trainer that committed it."""
    committed_at: str = ""


class Leader(msgspec.Struct, frozen=True, kw_only=True):
    """`leader`: the controller in charge; its create_revision is the leader's own epoch."""

    holder: str
    url: str
