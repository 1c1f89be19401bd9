"""What every worker process shares: who it is, its lease, its fence, its reports, and how it ends.

A worker may act only while it owns its part (its epoch is the newest that it has heard of) and while nobody asked it to
stop. It learns of both from watches and replies, on threads of their own; the working thread calls `check()` between
two units of work. What must not be done by a process that lost its part is fenced again where it is written.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NoReturn

import msgspec

from agents.controller import ControllerClient
from whimbrel import wire
from whimbrel.clock import rfc3339
from whimbrel.coordination import BlockingEtcd, Compare, KeyValue, LeaseKeeper, keys
from whimbrel.errors import EXIT_FAILED, EXIT_FENCED, EXIT_OK, EXIT_USER_ERROR, Fenced, Unreachable, UsageError
from whimbrel.limits import NOTE_CHARS, PROGRESS_EVERY_S, WORKER_LEASE_TTL_S
from whimbrel.log import configure_logging, get_logger
from whimbrel.spec import RunSpec
from whimbrel.wire.cluster import Head, NodeRecord, Ownership, Role, WorkerRecord
from whimbrel.wire.work import Caller, Phase, Progress

EXIT_STOPPED: Final = 128 + signal.SIGTERM
EXIT_FILE: Final = "exit-{rank}.json"
"""Written into the worker's folder on an orderly end, for an agent that adopted the process and cannot wait for it."""

log = get_logger("worker")


class Stopped(Exception):
    """The agent asked this worker to stop."""


@dataclass(frozen=True)
class Launch:
    """What the agent says to a worker through its environment."""

    run_id: str
    worker: str
    role: Role
    epoch: int
    start: int
    node_id: str
    rank: int
    world_size: int
    spec: RunSpec
    etcd_endpoints: list[str]
    controller: str
    cluster_token: str
    home: Path
    store: Path
    cache: Path
    chunks: str

    @classmethod
    def from_environment(cls) -> Launch:
        """Read the environment.

        Raises:
            UsageError: this process was not started by an agent.
        """
        env = os.environ
        try:
            return cls(
                run_id=env["WHIMBREL_RUN_ID"],
                worker=env["WHIMBREL_WORKER"],
                role=msgspec.convert(env["WHIMBREL_ROLE"], Role),
                epoch=int(env["WHIMBREL_EPOCH"]),
                start=int(env.get("WHIMBREL_START", "1")),
                node_id=env["WHIMBREL_NODE"],
                rank=int(env.get("RANK", "0")),
                world_size=int(env.get("WORLD_SIZE", "1")),
                spec=RunSpec.model_validate_json(env["WHIMBREL_SPEC_JSON"]),
                etcd_endpoints=env["WHIMBREL_ETCD"].split(","),
                controller=env["WHIMBREL_CONTROLLER"],
                cluster_token=env["WHIMBREL_CLUSTER_TOKEN"],
                home=Path(env["WHIMBREL_HOME"]),
                store=Path(env["WHIMBREL_STORE"]),
                cache=Path(env["WHIMBREL_CACHE"]),
                chunks=env["WHIMBREL_CHUNKS"],
            )
        except KeyError as error:
            raise UsageError(
                f"{error.args[0]} is not set, so this worker does not know its part.",
                hint="Workers are started by `whimbrel agent`, not by hand.",
            ) from error


class WorkerContext:
    """One worker's place in the cluster. Public attributes are read-only; methods are thread-safe."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.spec = launch.spec
        self.run_id, self.worker = launch.run_id, launch.worker
        self.role: Role = launch.role
        self.epoch, self.node_id = launch.epoch, launch.node_id
        self.rank, self.world_size = launch.rank, launch.world_size
        self.home, self.store, self.cache, self.chunks = launch.home, launch.store, launch.cache, launch.chunks
        self.caller = Caller(run_id=launch.run_id, worker=launch.worker, epoch=launch.epoch)
        self.controller = ControllerClient(launch.controller, launch.cluster_token, self.caller)
        self.paused = False
        self._stop = threading.Event()
        self._ended = threading.Event()
        self._fenced_by = ""
        self._changed = threading.Condition()
        self._head: tuple[Head, int] | None = None
        self._owners: dict[str, Ownership] = {}
        self._nodes: dict[str, NodeRecord] = {}
        self._phase: Phase = "starting"
        self._moved_at = time.monotonic()
        self._version = -1
        self._note = ""
        self._counters: dict[str, float] = {}
        self._gauges: dict[str, float] = {}

    @classmethod
    def start(cls) -> WorkerContext:
        """Take this worker's place: check ownership, take the lease, begin to watch and to report.

        Raises:
            Fenced: a newer owner exists.
            Unreachable: etcd does not answer.
        """
        context = cls(Launch.from_environment())
        signal.signal(signal.SIGTERM, lambda *_: context._stop.set())
        context._join()
        return context

    # -- may I go on? --------------------------------------------------------------------------------------------------
    def check(self) -> None:
        """Between two units of work. Cheap and local.

        Raises:
            Fenced: a newer owner of this worker's part is known.
            Stopped: the agent asked for an end.
        """
        if self._fenced_by:
            raise Fenced(self._fenced_by, hint="This process stops and writes nothing more.")
        if self._stop.is_set():
            raise Stopped

    def sleep(self, seconds: float) -> None:
        """Wait, but notice an end at once; then check()."""
        self._stop.wait(seconds)
        self.check()

    def owner_compare(self) -> Compare:
        """The condition that fences this worker's writes to etcd."""
        return Compare(keys.owner(self.run_id, self.worker), "mod", self.epoch)

    # -- what I do -----------------------------------------------------------------------------------------------------
    def progress(
        self,
        phase: Phase,
        *,
        version: int | None = None,
        note: str | None = None,
        counters: dict[str, float] | None = None,
        gauges: dict[str, float] | None = None,
    ) -> None:
        """Say what is being done. A thread sends it; counters are added to running totals, gauges replace."""
        with self._changed:
            moved = phase != self._phase or bool(counters) or (version is not None and version != self._version)
            self._phase = phase
            self._version = self._version if version is None else version
            self._note = self._note if note is None else note[:NOTE_CHARS]
            for name, value in (counters or {}).items():
                self._counters[name] = self._counters.get(name, 0.0) + value
            self._gauges.update(gauges or {})
            if moved:
                self._moved_at = time.monotonic()

    def tick(self) -> None:
        """Say that a long piece of work moves, though there is nothing else to tell of it: it does not hang."""
        with self._changed:
            self._moved_at = time.monotonic()

    # -- the world -----------------------------------------------------------------------------------------------------
    def head(self) -> tuple[Head, int] | None:
        """The newest committed version that this process heard of, with its key's mod_revision; None before version 0."""
        with self._changed:
            return self._head

    def wait_head(self, after_version: int, timeout_s: float) -> Head | None:
        """Wait for a head beyond a version; None when none came in time. Check() after it."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                if self._head is not None and self._head[0].version > after_version:
                    return self._head[0]
                remaining = deadline - time.monotonic()
                if remaining <= 0 or self._stop.is_set() or self._fenced_by:
                    return None
                self._changed.wait(min(remaining, 0.5))

    def sources(self) -> list[str]:
        """Chunk servers to ask, best first: the trainer's node, then this node, then all others."""
        with self._changed:
            trainer = self._owners.get("trainer")
            first = self._nodes.get(trainer.node_id) if trainer is not None else None
            others = sorted(self._nodes.values(), key=lambda node: node.node_id)
        found = [first.address] if first is not None else []
        found.append(self.chunks)
        found += [node.address for node in others]
        return list(dict.fromkeys(found))

    def close(self) -> None:
        """Give up the lease and end the threads."""
        self._ended.set()
        for thread in self._threads:
            thread.join(timeout=2.0)
        if self._lease is not None:
            self._lease.close(revoke=not self._fenced_by)
        self.controller.close()
        self.etcd.close()

    # -- internals -----------------------------------------------------------------------------------------------------
    def _join(self) -> None:
        self.etcd = BlockingEtcd(self.launch.etcd_endpoints)
        self._threads: list[threading.Thread] = []
        self._lease: LeaseKeeper | None = None
        found = self.etcd.get(keys.owner(self.run_id, self.worker))
        if found is None or found.mod_revision != self.epoch:
            raise Fenced(f"{self.worker} has a newer owner than epoch {self.epoch}.")
        if self.rank == 0:
            record = WorkerRecord(
                run_id=self.run_id,
                worker=self.worker,
                role=self.role,
                epoch=self.epoch,
                node_id=self.node_id,
                pid=os.getpid(),
                started_at=rfc3339(datetime.now(UTC)),
            )
            self._lease = LeaseKeeper(
                self.launch.etcd_endpoints,
                keys.worker(self.run_id, self.worker),
                wire.encode_json(record),
                WORKER_LEASE_TTL_S,
                guard=self.owner_compare(),
                on_fenced=self._fence,
            )
            self._lease.start()
            reporter = threading.Thread(target=self._report, name="progress", daemon=True)
            reporter.start()
            self._threads.append(reporter)
        self.etcd.watch(f"{keys.OWNERS}{self.run_id}/", self._take_owners)
        self.etcd.watch(keys.head(self.run_id), self._take_heads)
        self.etcd.watch(keys.NODES, self._take_nodes)

    def _fence(self, reason: str) -> None:
        with self._changed:
            self._fenced_by = self._fenced_by or reason
            self._changed.notify_all()

    def _take_owners(self, items: dict[str, KeyValue]) -> None:
        with self._changed:
            self._owners = {
                item.key.rpartition("/")[2]: wire.decode_json(item.value, Ownership) for item in items.values()
            }
        mine = items.get(keys.owner(self.run_id, self.worker))
        if mine is not None and mine.mod_revision > self.epoch:
            self._fence(f"{self.worker} was given to a newer owner (epoch {mine.mod_revision}, mine was {self.epoch}).")

    def _take_heads(self, items: dict[str, KeyValue]) -> None:
        found = items.get(keys.head(self.run_id))
        if found is None:
            return
        with self._changed:
            if self._head is None or found.mod_revision > self._head[1]:
                self._head = (wire.decode_json(found.value, Head), found.mod_revision)
                self._changed.notify_all()

    def _take_nodes(self, items: dict[str, KeyValue]) -> None:
        with self._changed:
            self._nodes = {
                record.node_id: record
                for record in (wire.decode_json(item.value, NodeRecord) for item in items.values())
            }

    def _report(self) -> None:
        while not self._ended.wait(PROGRESS_EVERY_S):
            with self._changed:
                progress = Progress(
                    caller=self.caller,
                    phase=self._phase,
                    phase_age_s=time.monotonic() - self._moved_at,
                    policy_version=self._version,
                    counters=dict(self._counters),
                    gauges=dict(self._gauges),
                    note=self._note,
                )
            try:
                reply = self.controller.progress(progress)
                self.paused = reply.paused
            except Fenced as error:
                self._fence(error.message)
            except Unreachable:
                continue  # the controller is away; the work goes on and the next report says where it is
            except Exception as error:
                log.warning("progress was refused", error=str(error))


def run_worker(main: Callable[[WorkerContext], None]) -> NoReturn:
    """Run a worker's main function and exit with the code that its agent understands.

    The last line on standard error is the sentence that explains a failure.
    """
    configure_logging("info")
    context: WorkerContext | None = None
    try:
        context = WorkerContext.start()
        main(context)
        code, message = EXIT_OK, ""
    except Stopped:
        code, message = EXIT_STOPPED, ""
    except Fenced as error:
        code, message = EXIT_FENCED, str(error)
    except UsageError as error:
        code, message = EXIT_USER_ERROR, str(error)
    except BaseException as error:
        traceback.print_exc()
        code, message = EXIT_FAILED, f"{type(error).__name__}: {error}"
    _leave(context, code, message)


def _leave(context: WorkerContext | None, code: int, message: str) -> NoReturn:
    try:
        _say_why(code, message)
        if context is not None:
            context.close()
        sys.stdout.flush()
    except Exception:
        traceback.print_exc()
    finally:
        # Libraries' threads (gRPC, torch) may hang in their exit handlers; the agent must not wait for that.
        os._exit(code)


def _say_why(code: int, message: str) -> None:
    # The file is for an agent that adopted this process. On a full disk the exit code alone must do.
    with suppress(OSError):
        Path(EXIT_FILE.format(rank=os.environ.get("RANK", "0"))).write_bytes(
            msgspec.json.encode({"code": code, "message": message})
        )
    if message:
        with suppress(OSError):
            print(message, file=sys.stderr, flush=True)  # noqa: T201
