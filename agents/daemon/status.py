"""A worker as others see it: the messages that reports and probes carry."""

from __future__ import annotations

from agents.daemon.worker import Rank, Worker
from whimbrel.wire.node import ProcessState
from whimbrel.wire.work import WorkerStatus


def status_of(worker: Worker) -> WorkerStatus:
    """The epoch as the agent last saw it, with what its processes use now."""
    stats = [stat for rank in worker.running_ranks() if (stat := rank.stat()) is not None]
    if worker.exit is not None:
        state = "exited"
    elif worker.ending is not None:
        state = "stopping"
    else:
        state = "paused" if worker.stopped else "running"
    return WorkerStatus(
        run_id=worker.key[0],
        worker=worker.key[1],
        epoch=worker.epoch,
        state=state,
        pids=[stat.pid for stat in stats],
        rss_bytes=sum(stat.rss_bytes for stat in stats),
        cpu_s=sum(stat.cpu_s for stat in stats),
        exit=worker.exit,
        adopted=worker.adopted,
    )


def process_state_of(worker: Worker, rank: Rank) -> ProcessState:
    """One rank, read from the kernel now."""
    stat = rank.stat()
    return ProcessState(
        run_id=worker.key[0],
        worker=worker.key[1],
        epoch=worker.epoch,
        rank=rank.rank,
        pid=rank.mark.pid if rank.mark else 0,
        state=stat.state if stat is not None else "X",
        cpu_s=stat.cpu_s if stat is not None else 0.0,
        rss_bytes=stat.rss_bytes if stat is not None else 0,
    )
