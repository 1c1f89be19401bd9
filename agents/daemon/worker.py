"""One epoch of one worker on this node: its processes, how far its end has come, who belongs to it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass

from agents.daemon import proc
from agents.daemon.assignments import Key
from agents.daemon.causes import RankEnd
from agents.daemon.proc import ProcessStat
from agents.daemon.records import EpochFolder, ProcessMark, WorkerFile
from whimbrel.wire.work import WorkerExit

Tag = tuple[str, str, str, str]
"""(node, run, worker, epoch) of a process's environment."""


@dataclass
class Rank:
    """One process of a worker. Without a mark it was never seen to start."""

    rank: int
    mark: ProcessMark | None
    child: subprocess.Popen[bytes] | None = None
    """Set when this agent started it; an adopted process is not this agent's child."""
    end: RankEnd | None = None

    def stat(self) -> ProcessStat | None:
        """The process as it is now; None when it is gone or its pid belongs to another."""
        if self.mark is None:
            return None
        found = proc.read_stat(self.mark.pid)
        return found if found is not None and found.started_ticks == self.mark.started_ticks else None


@dataclass
class Ending:
    """An end in progress: politely until a moment, by force after it."""

    reason: str
    ordered: bool
    """Told to by an ownership or by the agent's own stop; otherwise a failure of its own is being cleaned up."""
    polite_until: float
    killing_since: float | None = None


@dataclass
class Worker:
    """State of one epoch; changed only by `Processes`."""

    node_id: str
    record: WorkerFile
    folder: EpochFolder
    ranks: list[Rank]
    adopted: bool = False
    ending: Ending | None = None
    decisive: RankEnd | None = None
    """The bad end that came first, before anybody was told to stop."""
    first_good_at: float | None = None
    exit: WorkerExit | None = None
    recorded: bool = False
    stopped: bool = False
    """The operating system holds a rank (SIGSTOP)."""

    @property
    def key(self) -> Key:
        return self.record.run_id, self.record.worker

    @property
    def epoch(self) -> int:
        return self.record.epoch

    @property
    def label(self) -> str:
        return f"{self.record.run_id}/{self.record.worker}@{self.record.epoch}"

    @property
    def tag(self) -> Tag:
        return self.node_id, self.record.run_id, self.record.worker, str(self.record.epoch)

    def running_ranks(self) -> list[Rank]:
        return [rank for rank in self.ranks if rank.end is None]

    def members(self, stats: Iterable[ProcessStat], tags: TagReader) -> list[ProcessStat]:
        """Every living process that belongs to this epoch: ranks, what they started, what runs in their sessions,
        and whatever else carries the epoch's tag in its environment."""
        stats = list(stats)
        by_pid = {stat.pid: stat for stat in stats}
        roots: set[int] = set()
        sessions: set[int] = set()
        for mark in (rank.mark for rank in self.ranks):
            if mark is None:
                continue
            leader = by_pid.get(mark.pid)
            # A session's number stays taken while it has members, so a leader with another start time is a stranger.
            if leader is None or leader.started_ticks == mark.started_ticks:
                sessions.add(mark.pid)
            if leader is not None and leader.started_ticks == mark.started_ticks:
                roots.add(mark.pid)
        below = proc.descendants(stats, roots)
        return [
            stat
            for stat in stats
            if not stat.ended
            and stat.pid != os.getpid()
            and (stat.pid in below or stat.session in sessions or tags.read(stat) == self.tag)
        ]


class TagReader:
    """Whose a process is by its environment, remembered per process: an environment does not change by itself."""

    def __init__(self, home: str) -> None:
        self._home = home
        self._known: dict[tuple[int, int], Tag | None] = {}

    def read(self, stat: ProcessStat) -> Tag | None:
        """The process's tag; None for one that no agent of this home started."""
        identity = stat.pid, stat.started_ticks
        if identity not in self._known:
            self._known[identity] = self._read(stat.pid)
        return self._known[identity]

    def forget_all_but(self, stats: Iterable[ProcessStat]) -> None:
        """Drop what is remembered of processes that are gone."""
        alive = {(stat.pid, stat.started_ticks) for stat in stats}
        self._known = {identity: tag for identity, tag in self._known.items() if identity in alive}

    def _read(self, pid: int) -> Tag | None:
        environment = proc.read_environment(pid)
        if environment.get("WHIMBREL_HOME") != self._home or "WHIMBREL_EPOCH" not in environment:
            return None
        return (
            environment.get("WHIMBREL_NODE", ""),
            environment.get("WHIMBREL_RUN_ID", ""),
            environment.get("WHIMBREL_WORKER", ""),
            environment["WHIMBREL_EPOCH"],
        )
