"""A whole cluster on one machine, as child processes: etcd, controller, node agents.

Owns the processes: starts them in order, starts one again when it dies (as systemd would), ends them all. Knows
nothing of runs. A child may be held down for a while, which is how drills keep a part away on purpose.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TextIO

import httpx
import psutil

from whimbrel.coordination import etcd_command, require_free_port
from whimbrel.errors import TimedOut, Unreachable, WhimbrelError
from whimbrel.settings import Settings

READY_TIMEOUT_S: Final = 60.0
"""etcd and controller must answer within this; imports alone take seconds on a busy machine."""
STOP_TIMEOUT_S: Final = 15.0
"""From SIGTERM to SIGKILL of one child; an agent needs its workers' grace within it."""
RESTART_DELAY_S: Final = 1.0
"""Between the death of a child and its next start, so that a child that cannot start is no busy loop."""
SUPERVISOR: Final = "WHIMBREL_SUPERVISOR"
"""Environment variable that tells which `whimbrel up` started a process, for the next one to find what a killed one left."""
LOG_BYTES_MAX: Final = 16 * 1024 * 1024
"""A child's log is begun anew once it is larger; one older file is kept."""


@dataclass
class Child:
    """One supervised process."""

    name: str
    command: list[str]
    log_path: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0
    held: bool = False
    """Not to be started again until released."""
    log_from: int = 0
    """Where in the log the present start begins."""

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process is not None and self.process.poll() is None else None

    def start(self) -> None:
        """Start the process in a group of its own, its output appended to its log."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            self.log_from = log.tell()
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.environment},
                start_new_session=True,
            )
        self.starts += 1

    def bound_log(self) -> None:
        """Put a log that has grown too large aside, and begin it anew, though the process goes on writing to it."""
        if not self.log_path.exists() or self.log_path.stat().st_size <= LOG_BYTES_MAX:
            return
        try:
            shutil.copyfile(self.log_path, self.log_path.with_suffix(".log.1"))
        finally:  # without room for the copy the bound still holds
            os.truncate(self.log_path, 0)  # in append mode the process goes on at offset 0
            self.log_from = 0

    def last_lines(self, count: int = 5) -> str:
        """The end of what was logged since the last start, for messages."""
        if not self.log_path.exists():
            return ""
        with self.log_path.open("rb") as log:
            log.seek(max(self.log_from, self.log_path.stat().st_size - 4096))
            return "\n".join(log.read().decode(errors="replace").splitlines()[-count:])


class LocalCluster:
    """etcd, a controller and `nodes` agents on loopback, supervised by a thread of this process."""

    def __init__(
        self, settings: Settings, *, nodes: int, port: int, etcd_port: int, say: Callable[[str], None] = lambda _: None
    ) -> None:
        self.home = settings.home.resolve()
        self.url = f"http://127.0.0.1:{port}"
        self.port = port
        self._say = say
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._supervise, name="supervisor", daemon=True)
        self._lock = threading.Lock()
        self._pid_file: TextIO | None = None
        self.home.mkdir(parents=True, exist_ok=True)
        self.admin_token = settings.read_admin_token(create=True)
        settings.read_cluster_token(create=True)
        environment = {
            "WHIMBREL_HOME": str(self.home),
            "WHIMBREL_ETCD": f"127.0.0.1:{etcd_port}",
            "WHIMBREL_CONTROLLER": self.url,
            SUPERVISOR: str(os.getpid()),
            "OMP_NUM_THREADS": "1",
            "NUMBA_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
        }
        self.etcd_port = etcd_port
        self.children = {
            "etcd": self._child("etcd", etcd_command(self.home / "etcd", etcd_port), environment),
            "controller": self._child(
                "controller", _python("api.cli.main", "server", "--port", str(port)), environment
            ),
        }
        self.nodes = [f"node-{number}" for number in range(1, nodes + 1)]
        for name in self.nodes:
            node = {**environment, "WHIMBREL_NODE": name}
            self.children[name] = self._child(name, _python("agents.daemon"), node)

    # -- life ----------------------------------------------------------------------------------------------------------
    def start(self) -> None:
        """Start everything and wait until the controller is ready.

        Raises:
            WhimbrelError: a part does not start; the message holds the end of its log.
        """
        self._claim_home()
        require_free_port(self.port, "API and dashboard", "--port")
        require_free_port(self.etcd_port, "etcd", "--etcd-port")
        for name in ("etcd", "controller"):
            self.children[name].start()
        self._wait_ready()
        for name in self.nodes:
            self.children[name].start()
        self._thread.start()

    def stop(self) -> None:
        """End everything, agents first so that they can end their workers; nothing of ours is left behind."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout=STOP_TIMEOUT_S)
        self._end([self.children[name] for name in self.nodes])
        self._end([self.children["controller"]])
        self._end([self.children["etcd"]])
        end_workers(self.home)
        if self._pid_file is not None:
            self._pid_file.close()

    # -- what a drill does to a child -----------------------------------------------------------------------------------
    def kill(self, name: str, *, hold: bool = False) -> int:
        """SIGKILL a child; it is started again unless `hold`. Returns the pid that was killed."""
        with self._lock:
            child = self.children[name]
            child.held = hold
            pid = child.pid
            if pid is None:
                raise WhimbrelError(f"{name} is not running, so it cannot be killed.")
            os.kill(pid, signal.SIGKILL)
            child.process and child.process.wait(timeout=STOP_TIMEOUT_S)
        return pid

    def release(self, name: str) -> None:
        """Let a held child be started again."""
        with self._lock:
            self.children[name].held = False

    def pid(self, name: str) -> int:
        """The child's process id.

        Raises:
            WhimbrelError: it is not running.
        """
        pid = self.children[name].pid
        if pid is None:
            raise WhimbrelError(f"{name} is not running.")
        return pid

    # -- internals -----------------------------------------------------------------------------------------------------
    def _child(self, name: str, command: list[str], environment: Mapping[str, str]) -> Child:
        return Child(name, command, self.home / "logs" / f"{name}.log", environment)

    def _claim_home(self) -> None:
        self._pid_file = (self.home / "up.lock").open("a+")
        try:
            fcntl.flock(self._pid_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise Unreachable(
                f"Another `whimbrel up` uses {self.home} already.",
                hint="End it first, or give this one another folder with WHIMBREL_HOME.",
            ) from error
        left = end_left_behind(self.home)
        if left:
            self._say(f"ended {left} processes that an earlier `whimbrel up` on {self.home} had left behind")

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        reason = "it did not answer"
        while time.monotonic() < deadline:
            for name in ("etcd", "controller"):
                child = self.children[name]
                if child.pid is None:
                    raise WhimbrelError(
                        f"{name} ended while starting: {child.last_lines()}", hint=f"Its log is {child.log_path}."
                    )
            try:
                answer = httpx.get(f"{self.url}/readyz", timeout=2.0, trust_env=False)
                if answer.status_code == 200:
                    return
                reason = _reasons(answer)
            except httpx.HTTPError:
                pass
            time.sleep(0.1)
        raise TimedOut(
            f"The controller was not ready within {READY_TIMEOUT_S:.0f} s: {reason}",
            hint=f"Look into {self.children['controller'].log_path}.",
        )

    def _supervise(self) -> None:
        due: dict[str, float] = {}
        while not self._stopping.wait(0.1):
            for child in self.children.values():
                # No memory for a process, no room on the disk, nobody who reads what is said: the next round may do better,
                # and without this thread nothing that dies would ever be started again.
                with suppress(OSError):
                    self._tend(child, due)

    def _tend(self, child: Child, due: dict[str, float]) -> None:
        """Start a child again that ended, and keep its log within its bound."""
        now = time.monotonic()
        if child.pid is not None or child.held:
            due.pop(child.name, None)
        elif now >= due.setdefault(child.name, now + RESTART_DELAY_S):
            due.pop(child.name)
            with self._lock:
                child.start()
            self._say(f"{child.name} had ended and is started again")
        child.bound_log()

    def _end(self, children: list[Child]) -> None:
        for child in children:
            if child.pid is not None:
                os.kill(child.pid, signal.SIGCONT)
                os.kill(child.pid, signal.SIGTERM)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for child in children:
            if child.process is None:
                continue
            try:
                child.process.wait(timeout=max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait(timeout=STOP_TIMEOUT_S)


def end_left_behind(home: Path) -> int:
    """End what another `up` on `home` started and, killed itself, could not end. Returns how many processes.

    Only for the holder of the home's lock. Nothing is lost by it: what was committed is in the log.
    """
    own = str(os.getpid())
    left = [process for process, environment in _processes_of(home) if environment.get(SUPERVISOR, own) != own]
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.resume()
            process.terminate()
    _, alive = psutil.wait_procs(left, timeout=STOP_TIMEOUT_S)
    _kill(alive)
    return len(left) + end_workers(home)


def end_workers(home: Path) -> int:
    """Kill worker processes that were started below `home` and that nobody supervises any more. Returns how many."""
    found = [process for process, environment in _processes_of(home) if "WHIMBREL_EPOCH" in environment]
    _kill(found)
    return len(found)


def _processes_of(home: Path) -> Iterator[tuple[psutil.Process, dict[str, str]]]:
    """Processes that belong to a cluster of this home, and their environments."""
    marker = str(home.resolve())
    for process in psutil.process_iter(["pid"]):
        try:
            environment = process.environ()
        except (psutil.Error, OSError):
            continue
        if environment.get("WHIMBREL_HOME") == marker:
            yield process, environment


def _kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=STOP_TIMEOUT_S)


def _reasons(answer: httpx.Response) -> str:
    """Why a controller is not ready, in its own words."""
    try:
        checks = answer.json()["checks"].values()
        return " ".join(f"{check['reason'].rstrip('.')}." for check in checks if not check["ok"] and check["reason"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return answer.text[:300]


def _python(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", module, *arguments]
