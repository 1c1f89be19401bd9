"""What the kernel says of processes: /proc, read once per question.

A process is named by its pid *and* its start time; a pid alone may belong to somebody else by now.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc")
_PR_SET_CHILD_SUBREAPER: Final = 36
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class ProcessStat:
    """One line of /proc/PID/stat."""

    pid: int
    state: str
    """Kernel letter: R S D T t Z X; a `Z` has ended and waits for its parent."""
    parent: int
    group: int
    session: int
    started_ticks: int
    """Clock ticks between boot and the process's start: with the pid, its identity until the next boot."""
    cpu_s: float
    rss_bytes: int
    wait_status: int
    """As waitpid would give it; only meaningful in state Z, and 0 where the kernel hides it."""

    @property
    def ended(self) -> bool:
        return self.state in ("Z", "X", "x")

    @property
    def stopped(self) -> bool:
        """Whether a signal (SIGSTOP) or a debugger holds it."""
        return self.state in ("T", "t")


def read_stat(pid: int) -> ProcessStat | None:
    """The process as it is now, or None when there is none of this pid."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):  # gone, or gone while it was read
        return None
    # The name stands in parentheses and may itself hold spaces and parentheses: split after the last one.
    fields = text.rpartition(")")[2].split()
    if len(fields) < 22:
        return None
    return ProcessStat(
        pid=pid,
        state=fields[0],
        parent=int(fields[1]),
        group=int(fields[2]),
        session=int(fields[3]),
        started_ticks=int(fields[19]),
        cpu_s=(int(fields[11]) + int(fields[12])) / _TICKS_PER_S,
        rss_bytes=int(fields[21]) * _PAGE_BYTES,
        wait_status=int(fields[49]) if len(fields) > 49 else 0,
    )


def all_stats() -> list[ProcessStat]:
    """Every process of the machine that can be seen, in order of pid."""
    pids = sorted(int(name) for name in os.listdir(_PROC) if name.isdigit())
    return [stat for stat in map(read_stat, pids) if stat is not None]


def read_environment(pid: int) -> dict[str, str]:
    """The environment a process was started with; empty when it is gone or another user's."""
    try:
        data = (_PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return {}
    pairs = (entry.split(b"=", 1) for entry in data.split(b"\0") if b"=" in entry)
    return {os.fsdecode(name): os.fsdecode(value) for name, value in pairs}


def descendants(stats: Iterable[ProcessStat], roots: set[int]) -> set[int]:
    """Pids of `roots` and of everything that was started below them, among `stats`."""
    children: dict[int, list[int]] = {}
    for stat in stats:
        children.setdefault(stat.parent, []).append(stat.pid)
    found: set[int] = set()
    waiting = list(roots)
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            found.add(pid)
            waiting.extend(children.get(pid, []))
    return found


def send_signal(stat: ProcessStat, number: signal.Signals) -> None:
    """Signal exactly the process that `stat` describes; nothing happens when it is gone.

    A pidfd pins the process between the check of its start time and the signal, so that a reused pid is never hit.
    """
    try:
        descriptor = os.pidfd_open(stat.pid)
    except ProcessLookupError:
        return
    except OSError:  # a kernel without pidfd: the window between check and signal stays, microseconds wide
        _send_by_pid(stat, number)
        return
    try:
        now = read_stat(stat.pid)
        if now is not None and now.started_ticks == stat.started_ticks and not now.ended:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, number)
    finally:
        os.close(descriptor)


def _send_by_pid(stat: ProcessStat, number: signal.Signals) -> None:
    now = read_stat(stat.pid)
    if now is not None and now.started_ticks == stat.started_ticks and not now.ended:
        with contextlib.suppress(ProcessLookupError):
            os.kill(stat.pid, number)


def become_subreaper() -> bool:
    """Make orphans among this process's descendants its own children, so that none escapes to init unseen."""
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


@cache
def boot_id() -> str:
    """Changes with each boot of the machine; start times of processes are only comparable within one."""
    try:
        return (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def memory_kills() -> int:
    """How many processes the kernel has killed for memory since boot; 0 where it does not say."""
    try:
        for line in (_PROC / "vmstat").read_text(encoding="ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    except (OSError, ValueError):
        return 0
    return 0


class ExitWatch:
    """Calls back when one of some processes ends, whoever is its parent; polling finds it anyway, only later."""

    def __init__(self, add_reader: Callable[..., object], remove_reader: Callable[[int], object]) -> None:
        self._add = add_reader
        self._remove = remove_reader
        self._descriptors: dict[int, int] = {}

    def watch(self, pid: int, wake: Callable[[], None]) -> None:
        """Call `wake` once from the event loop when the process ends."""
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:  # already gone, or no pidfd here
            wake()
            return
        self._descriptors[pid] = descriptor
        self._add(descriptor, self._ended, pid, wake)

    def close(self) -> None:
        for pid in list(self._descriptors):
            self._forget(pid)

    def _ended(self, pid: int, wake: Callable[[], None]) -> None:
        self._forget(pid)
        wake()

    def _forget(self, pid: int) -> None:
        descriptor = self._descriptors.pop(pid, None)
        if descriptor is not None:
            self._remove(descriptor)
            os.close(descriptor)
