"""The processes of this node's workers: started, watched, ended, adopted. Owns them all; decides nothing about them.

An epoch is `exited` only after every process of it is gone: ranks waited for, everything they started killed. Every
step is safe to be interrupted by the agent's death: the next agent reads the folders and goes on.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Collection, Iterable

import msgspec

from agents.daemon import logs, proc
from agents.daemon.assignments import Key, Local, Start
from agents.daemon.causes import RankEnd, explain, first_cause
from agents.daemon.config import AgentConfig
from agents.daemon.launch import Launch, free_port, launch_environment
from agents.daemon.proc import ProcessStat
from agents.daemon.records import EndedFile, EpochFolder, ProcessMark, WorkerFile, WorkerFolders
from agents.daemon.status import process_state_of, status_of
from agents.daemon.worker import Ending, Rank, TagReader, Worker
from whimbrel import limits
from whimbrel.clock import Clock
from whimbrel.limits import STRAY_SCAN_EVERY_S
from whimbrel.log import get_logger
from whimbrel.wire.node import ProcessState
from whimbrel.wire.work import WorkerStatus

log = get_logger("agent")


class Processes:
    """All workers of one node. Not thread-safe: used from the agent's loop alone."""

    def __init__(
        self,
        config: AgentConfig,
        launch: Launch,
        clock: Clock,
        *,
        watch_exit: Callable[[int], None] = lambda _pid: None,
        subreaper: bool = False,
    ) -> None:
        """`watch_exit` is told each pid to watch. `subreaper`: orphans of workers become this process's children, and
        any child that belongs to no worker is a stray to be ended; only for a process that has no other children."""
        self._config = config
        self._launch = launch
        self._clock = clock
        self._watch_exit = watch_exit
        self._subreaper = subreaper
        self._strays_at = clock.monotonic()
        self._workers: dict[tuple[Key, int], Worker] = {}
        self._tags = TagReader(str(config.home))
        self.folders = WorkerFolders(config.workers)
        self.chunks = ""
        """host:port of this node's chunk server, for the workers' environment."""

    # -- questions ------------------------------------------------------------------------------------------------------

    def locals(self) -> list[Local]:
        """What `decide` needs to know."""
        return [
            Local(
                run_id=worker.key[0],
                worker=worker.key[1],
                epoch=worker.epoch,
                state="exited" if worker.exit is not None else "stopping" if worker.ending is not None else "running",
                killing=worker.ending is not None and worker.ending.killing_since is not None,
            )
            for worker in self._workers.values()
        ]

    def live(self) -> list[Worker]:
        """Epochs with processes that have not all been accounted for."""
        return [worker for worker in self._workers.values() if worker.exit is None]

    def statuses(self) -> list[WorkerStatus]:
        """Every live epoch, and every exit that the controller has not recorded, the newest EXITS_KEPT of them."""
        exits = [worker for worker in self._workers.values() if worker.exit is not None and not worker.recorded]
        return [status_of(worker) for worker in [*self.live(), *exits[-limits.EXITS_KEPT :]]]

    def process_states(self) -> list[ProcessState]:
        """Each rank as the kernel has it now."""
        return [process_state_of(worker, rank) for worker in self.live() for rank in worker.ranks if rank.mark]

    def unkillable(self) -> list[Worker]:
        """Epochs whose processes outlived SIGKILL by KILL_WAIT_S."""
        now = self._clock.monotonic()
        return [
            worker
            for worker in self.live()
            if worker.ending is not None
            and worker.ending.killing_since is not None
            and now - worker.ending.killing_since > limits.KILL_WAIT_S
        ]

    # -- start ----------------------------------------------------------------------------------------------------------

    def start(self, action: Start) -> None:
        """Start the processes of an epoch. What cannot be started becomes an exit with its cause, never an exception."""
        folder = self.folders.of(action.run_id, action.worker, action.epoch)
        record = WorkerFile(
            run_id=action.run_id,
            worker=action.worker,
            role=action.role,
            epoch=action.epoch,
            start=action.start,
            ranks=action.ranks,
            boot_id=proc.boot_id(),
            memory_kills=proc.memory_kills(),
        )
        ranks = [Rank(rank, None) for rank in range(action.ranks)]
        worker = Worker(self._config.node_id, record, folder, ranks)
        self._workers[worker.key, worker.epoch] = worker
        try:
            folder.write_worker(record)  # the intent first: what starts after it can be found by the next agent
            self._spawn(worker, action)
        except (OSError, ValueError) as error:
            cause = f"The worker could not be started: {error}."
            log.error("worker did not start", worker=worker.label, error=str(error))
            for rank in worker.ranks:
                if rank.mark is None:
                    rank.end = RankEnd(rank.rank, None, cause)
            worker.decisive = RankEnd(0, None, cause)
            self._begin_ending(worker, cause, ordered=False, polite=False)
        else:
            log.info("worker started", worker=worker.label, pids=[rank.mark.pid for rank in ranks if rank.mark])

    def _spawn(self, worker: Worker, action: Start) -> None:
        main_port = free_port()
        command = self._launch(action)
        output = logs.open_log(worker.folder.path)
        try:
            for rank in worker.ranks:
                rank.child = subprocess.Popen(
                    command,
                    cwd=worker.folder.path,
                    env=launch_environment(self._config, self.chunks, action, rank.rank, main_port),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,  # its own process group: signals to the agent's terminal do not reach it
                )
                stat = proc.read_stat(rank.child.pid)
                assert stat is not None, "a child that was not waited for keeps its entry in /proc"
                rank.mark = ProcessMark(rank=rank.rank, pid=stat.pid, started_ticks=stat.started_ticks)
                self._note_marks(worker)
                self._watch_exit(stat.pid)
        finally:
            os.close(output)

    def _note_marks(self, worker: Worker) -> None:
        marks = [rank.mark for rank in worker.ranks if rank.mark is not None]
        worker.record = msgspec.structs.replace(worker.record, processes=marks)
        worker.folder.write_worker(worker.record)

    # -- adoption -------------------------------------------------------------------------------------------------------

    def adopt(self) -> None:
        """Take over what an earlier agent of this node left: live processes, unreported exits, unfinished starts."""
        for run_id, name, epoch, folder in self.folders.all():
            record = folder.read_worker()
            if record is None or (record.run_id, record.worker, record.epoch) != (run_id, name, epoch):
                continue  # the intent was never written, so nothing was started under it
            worker = _recall(self._config.node_id, record, folder)
            self._workers[worker.key, worker.epoch] = worker
            for rank in worker.running_ranks():
                if rank.stat() is not None and rank.mark is not None:
                    self._watch_exit(rank.mark.pid)
            if worker.exit is None:
                log.info("worker adopted", worker=worker.label, pids=[m.pid for m in record.processes])
        self._kill_unowned()

    def _kill_unowned(self) -> None:
        """End processes that carry this node's tag but belong to no epoch that is known to be alive."""
        known = {worker.tag for worker in self.live()}
        for stat in proc.all_stats():
            tag = self._tags.read(stat)
            if tag is not None and tag[0] == self._config.node_id and tag not in known and not stat.ended:
                log.warning("ended a process that an earlier agent had lost", pid=stat.pid, tag="/".join(tag))
                proc.send_signal(stat, signal.SIGKILL)

    # -- stop -----------------------------------------------------------------------------------------------------------

    def stop(self, run_id: str, worker: str, epoch: int, *, polite: bool, reason: str) -> None:
        """Begin to end an epoch: SIGTERM and STOP_GRACE_S later SIGKILL, or SIGKILL at once. Repeating is harmless."""
        found = self._workers.get(((run_id, worker), epoch))
        if found is not None and found.exit is None:
            self._begin_ending(found, reason, ordered=True, polite=polite)

    def stop_all(self, reason: str) -> None:
        """Begin to end every worker politely."""
        for worker in self.live():
            self.stop(*worker.key, worker.epoch, polite=True, reason=reason)

    def _begin_ending(self, worker: Worker, reason: str, *, ordered: bool, polite: bool) -> None:
        now = self._clock.monotonic()
        if worker.ending is None:
            log.info("worker is ended", worker=worker.label, reason=reason, polite=polite)
            worker.ending = Ending(reason, ordered, now + (limits.STOP_GRACE_S if polite else 0.0))
            if polite:
                for stat in self._members(worker, proc.all_stats()):
                    proc.send_signal(stat, signal.SIGTERM)
        elif not polite:
            worker.ending.polite_until = min(worker.ending.polite_until, now)

    # -- watch ----------------------------------------------------------------------------------------------------------

    def poll(self) -> bool:
        """Look at every process once, press ends forward, account for those that are over.

        Returns whether anything changed that a report should say at once.
        """
        before = {worker.label: _outline(worker) for worker in self._workers.values()}
        for worker in self.live():
            self._poll_worker(worker)
        self._reap_strays()
        return before != {worker.label: _outline(worker) for worker in self._workers.values()}

    def _poll_worker(self, worker: Worker) -> None:
        now = self._clock.monotonic()
        stats = [(rank, rank.stat()) for rank in worker.running_ranks()]
        worker.stopped = any(stat is not None and stat.stopped for _, stat in stats)
        new_ends = [end for rank, stat in stats if (end := _end_of(worker, rank, stat)) is not None]
        if worker.decisive is None and (worker.ending is None or not worker.ending.ordered):
            worker.decisive = first_cause(new_ends)
        if new_ends and all(end.good for end in new_ends) and worker.first_good_at is None:
            worker.first_good_at = now
        self._end_the_rest(worker, now)
        over = not worker.running_ranks()
        if worker.ending is None and not over:
            return
        everything = proc.all_stats()
        members = self._members(worker, everything)
        if over and not members:
            self._conclude(worker)
            return
        ending = worker.ending
        # A stopped process cannot act on SIGTERM, and once the ranks are gone nobody minds the rest.
        if ending is None or over or worker.stopped or now >= ending.polite_until:
            if ending is None:
                ending = worker.ending = Ending("", ordered=False, polite_until=now)
            ending.killing_since = now if ending.killing_since is None else ending.killing_since
            for stat in members:
                proc.send_signal(stat, signal.SIGKILL)

    def _end_the_rest(self, worker: Worker, now: float) -> None:
        """One rank's bad end, or its good end long ago, is the end of all."""
        if worker.ending is not None or not worker.running_ranks():
            return
        if worker.decisive is not None:
            reason = f"rank {worker.decisive.rank} failed"
            self._begin_ending(worker, reason, ordered=False, polite=False)
        elif worker.first_good_at is not None and now - worker.first_good_at > limits.RANK_SKEW_S:
            running = worker.running_ranks()[0].rank
            reason = f"rank {running} still ran {limits.RANK_SKEW_S:.0f} s after the first rank had finished"
            self._begin_ending(worker, reason, ordered=True, polite=False)

    def _conclude(self, worker: Worker) -> None:
        """Every process of the epoch is gone: write down and keep how it ended."""
        ends = [rank.end for rank in worker.ranks if rank.end is not None]
        ending = worker.ending
        decisive = worker.decisive or first_cause(ends) or ends[0]
        tail, _ = logs.read_tail(worker.folder.path, limits.EXIT_TAIL_BYTES)
        ordered = ending is not None and ending.ordered and worker.decisive is None
        worker.exit = explain(
            decisive,
            log_tail=tail,
            ranks=len(worker.ranks),
            killed_for_memory=proc.memory_kills() > worker.record.memory_kills,
            stop_reason=ending.reason if ordered and ending is not None else "",
            adopted=worker.adopted,
        )
        log.info("worker exited", worker=worker.label, code=worker.exit.code, cause=worker.exit.cause)
        self._write_ended(worker)

    def _write_ended(self, worker: Worker) -> None:
        assert worker.exit is not None
        try:
            worker.folder.write_ended(EndedFile(exit=worker.exit, recorded=worker.recorded))
        except OSError as error:  # a full disk: this agent still knows, a later one reports it as unwatched
            log.error("how a worker ended could not be written", worker=worker.label, error=str(error))

    def _members(self, worker: Worker, stats: Iterable[ProcessStat]) -> list[ProcessStat]:
        return worker.members(stats, self._tags)

    def _reap_strays(self) -> None:
        """Wait for orphans that came to this process, and end those that left their worker."""
        now = self._clock.monotonic()
        if not self._subreaper or now - self._strays_at < STRAY_SCAN_EVERY_S:
            return
        self._strays_at = now
        stats = proc.all_stats()
        self._tags.forget_all_but(stats)
        ranks = {rank.child.pid for worker in self.live() for rank in worker.ranks if rank.child is not None}
        owned = {stat.pid for worker in self.live() for stat in self._members(worker, stats)}
        for stat in stats:
            if stat.parent != os.getpid() or stat.pid in ranks:
                continue
            if stat.ended:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(stat.pid, os.WNOHANG)
            elif stat.pid not in owned:
                log.warning("ended a process that had left its worker", pid=stat.pid)
                proc.send_signal(stat, signal.SIGKILL)

    # -- bookkeeping ----------------------------------------------------------------------------------------------------

    def record_exits(self, names: Iterable[str]) -> None:
        """The controller has recorded these exits (`RUN/WORKER@EPOCH`): they leave the report, not the memory, because
        an epoch must not start twice."""
        wanted = set(names)
        told = [worker for worker in self._workers.values() if worker.label in wanted and worker.exit is not None]
        for worker in told:
            worker.recorded = True
            self._write_ended(worker)
        for key in {worker.key for worker in told}:
            for epoch in self.folders.prune(*key):
                self._workers.pop((key, epoch), None)

    def prune(self, current: Collection[tuple[Key, int]]) -> None:
        """Keep at most EPOCH_FOLDERS_MAX folders: the oldest recorded exits go, but never an epoch that etcd still
        names (`current`), because without its folder it would start a second time."""
        settled = [
            worker for worker in self._workers.values() if worker.recorded and (worker.key, worker.epoch) not in current
        ]
        surplus = len(self._workers) - limits.EPOCH_FOLDERS_MAX
        for worker in sorted(settled, key=lambda worker: worker.epoch)[: max(0, surplus)]:
            self.folders.remove(worker.folder)
            del self._workers[worker.key, worker.epoch]

    def rotate_logs(self) -> None:
        """Keep every live worker's output within its bound."""
        for worker in self.live():
            try:
                if logs.rotate(worker.folder.path):
                    log.info("worker's output was cut", worker=worker.label, limit_bytes=limits.WORKER_LOG_BYTES)
            except OSError as error:
                log.warning("worker's output could not be cut", worker=worker.label, error=str(error))


def _recall(node_id: str, record: WorkerFile, folder: EpochFolder) -> Worker:
    """A worker as an earlier agent left it. Processes of an earlier boot are gone whatever their numbers."""
    same_boot = record.boot_id == proc.boot_id()
    marks = {mark.rank: mark for mark in record.processes} if same_boot else {}
    ranks = [Rank(rank, marks.get(rank)) for rank in range(record.ranks)]
    ended = folder.read_ended()
    worker = Worker(node_id, record, folder, ranks, adopted=True)
    if ended is not None:
        worker.exit, worker.recorded = ended.exit, ended.recorded
    return worker


def _end_of(worker: Worker, rank: Rank, stat: ProcessStat | None) -> RankEnd | None:
    """How a rank ended, noted in it; None while it runs."""
    if rank.child is not None:
        code = rank.child.poll()
        if code is None:
            return None
    else:
        if stat is not None and not stat.ended:
            return None
        # Not our child. Its status can still be seen while its parent has not waited for it.
        seen = os.waitstatus_to_exitcode(stat.wait_status) if stat is not None and stat.wait_status else None
        code = seen
    own_words = worker.folder.read_orderly_exit(rank.rank)
    if own_words is not None and code is None:
        code = own_words.code
    said = own_words.message if own_words is not None and own_words.code == code else ""
    rank.end = RankEnd(rank.rank, code, said)
    return rank.end


def _outline(worker: Worker) -> tuple[object, ...]:
    return worker.exit is not None, worker.ending is not None, worker.stopped
