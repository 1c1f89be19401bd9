"""Calls that an agent answers on its node's chunk server: `probe`, `workers` and `logs`."""

from __future__ import annotations

import msgspec

from whimbrel.wire.work import WorkerStatus


class ProcessState(msgspec.Struct, frozen=True, kw_only=True):
    """One process as the kernel has it at the moment of the call."""

    run_id: str
    worker: str
    epoch: int
    rank: int
    pid: int
    state: str
    """The kernel's letter: R running, S sleeping, D in the kernel, T stopped, Z ended but not waited for, X gone."""
    cpu_s: float = 0.0
    rss_bytes: int = 0


class ProbeReply(msgspec.Struct, frozen=True, kw_only=True):
    """`probe` (empty request): a sign of life of the node, and a second witness for its workers."""

    node_id: str
    incarnation: str
    uptime_s: float
    """Since the agent started, on its monotonic clock."""
    owners_age_s: float
    """Since the agent last heard from etcd which workers it owns; negative when it never has."""
    workers: list[WorkerStatus] = []
    processes: list[ProcessState] = []


class WorkersReply(msgspec.Struct, frozen=True, kw_only=True):
    """`workers` (empty request): all workers as the agent sees them."""

    node_id: str
    incarnation: str
    workers: list[WorkerStatus] = []


class LogsRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`logs`: the end of a worker's output."""

    run_id: str
    worker: str
    epoch: int | None = None
    """None: the newest epoch that this node has."""
    tail_bytes: int = 16_384
    """Capped at LOG_TAIL_BYTES."""


class LogsReply(msgspec.Struct, frozen=True, kw_only=True):
    run_id: str
    worker: str
    epoch: int
    text: str
    """The last `tail_bytes`, undecodable bytes replaced; empty when the worker printed nothing."""
    size_bytes: int
    """Of the current file."""
