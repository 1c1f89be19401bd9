"""A private etcd on loopback, as a child of this process that does not outlive it."""

from __future__ import annotations

import http.client
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Final

from whimbrel.errors import TimedOut, WhimbrelError
from whimbrel.limits import ETCD_START_TIMEOUT_S, ETCD_STOP_TIMEOUT_S

_VERSION = re.compile(r"etcd Version: (\d+)\.(\d+)")
OLDEST: Final = (3, 4)


def etcd_command(data_dir: Path, client_port: int, peer_port: int = 0) -> list[str]:
    """The command line of a single-member etcd on loopback.

    Raises:
        WhimbrelError: etcd is not installed, or too old.
    """
    binary = shutil.which("etcd")
    if binary is None:
        raise WhimbrelError(
            "etcd is not installed on this machine.",
            hint="sudo apt-get install etcd-server, or use a cluster of yours: WHIMBREL_ETCD=host:2379.",
        )
    said = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    found = _VERSION.search(said)
    if found is None or (int(found[1]), int(found[2])) < OLDEST:
        raise WhimbrelError(
            f"{binary} is no etcd {OLDEST[0]}.{OLDEST[1]} or newer.", hint="Install a newer etcd-server package."
        )
    client, peer = f"http://127.0.0.1:{client_port}", f"http://127.0.0.1:{peer_port or free_port()}"
    return [
        *(binary, "--name", "whimbrel", "--data-dir", str(data_dir), "--log-level", "warn"),
        *("--listen-client-urls", client, "--advertise-client-urls", client),
        *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"whimbrel={peer}"),
        # A single member waits for nobody: a short election makes the start short.
        *("--heartbeat-interval", "50", "--election-timeout", "500"),
        # Heartbeats make no revisions, so an hour of history is small; it serves watches that were away.
        *("--auto-compaction-mode", "periodic", "--auto-compaction-retention", "1h"),
    ]


def free_port() -> int:
    """A port of loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def require_free_port(port: int, what: str, option: str) -> None:
    """Refuse a port that is in use.

    Raises:
        WhimbrelError: somebody listens there.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise WhimbrelError(
                f"Port {port} of 127.0.0.1, wanted for {what}, is in use.", hint=f"Choose another with {option}."
            ) from error


class EtcdServer:
    """One etcd process; its data outlives it, so that it can be started again."""

    def __init__(self, data_dir: Path, *, client_port: int = 0, log_path: Path | None = None) -> None:
        self.data_dir = data_dir
        self.client_port = client_port or free_port()
        self.peer_port = free_port()
        self.log_path = log_path or data_dir.with_suffix(".log")
        self.process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.client_port}"

    @property
    def pid(self) -> int:
        assert self.process is not None, "etcd was not started"
        return self.process.pid

    def start(self, timeout_s: float = ETCD_START_TIMEOUT_S) -> None:
        """Start etcd and wait until it answers.

        Raises:
            WhimbrelError: it is not installed, its port is in use, or it ends at once.
            TimedOut: it does not answer in time.
        """
        require_free_port(self.client_port, "etcd", "--etcd-port")
        command = etcd_command(self.data_dir, self.client_port, self.peer_port)
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self._guard = _guard(self.process.pid)
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise WhimbrelError(f"etcd ended with code {self.process.returncode}.", hint=f"See {self.log_path}.")
            if _is_healthy(self.client_port):
                return
            time.sleep(0.05)
        self.kill()
        raise TimedOut(f"etcd did not answer within {timeout_s:.0f} s.", hint=f"See {self.log_path}.")

    def stop(self) -> None:
        """End it in order, or by force after a while."""
        if self.process is None or self.process.poll() is not None:
            return
        self.resume()
        self.process.terminate()
        try:
            self.process.wait(timeout=ETCD_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._end_guard()

    def kill(self) -> None:
        """SIGKILL."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(timeout=ETCD_STOP_TIMEOUT_S)
        self._end_guard()

    def pause(self) -> None:
        """SIGSTOP."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def _end_guard(self) -> None:
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.kill()
            guard.wait(timeout=ETCD_STOP_TIMEOUT_S)
            assert guard.stdin is not None
            guard.stdin.close()


def _guard(pid: int) -> subprocess.Popen[bytes]:
    """Kill `pid` when this process ends, however it ends: its end of the pipe closes then.

    The kernel's own death signal is not used because it comes when the starting thread ends, which may be any thread.
    """
    return subprocess.Popen(
        ["/bin/sh", "-c", 'read _; kill -9 "$0"', str(pid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _is_healthy(client_port: int) -> bool:
    """Whether etcd says that it can serve; it accepts connections before that."""
    connection = http.client.HTTPConnection("127.0.0.1", client_port, timeout=1.0)
    try:
        connection.request("GET", "/health")
        return b'"true"' in connection.getresponse().read(1024)
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
