"""Workers that are tiny scripts, and a controller that only listens."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from agents.daemon import proc
from agents.daemon.assignments import Start
from agents.daemon.config import AgentConfig
from whimbrel import ids

PATIENT = """
import os, signal, sys, time
print("started", os.environ["WHIMBREL_WORKER"], os.environ["WHIMBREL_EPOCH"], os.environ["RANK"], flush=True)
time.sleep(120)
"""
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(120)"


def python(code: str) -> Callable[[Start], list[str]]:
    """A launch command that runs `code`, without site packages: it starts fast."""
    return lambda _action: [sys.executable, "-S", "-E", "-c", code]


def agent_config(home: Path, *, etcd: str = "127.0.0.1:1", controller: str = "http://127.0.0.1:1") -> AgentConfig:
    return AgentConfig(
        node_id="n1",
        home=home.resolve(),
        store=home.resolve() / "store",
        etcd_endpoints=(etcd,),
        controller=controller,
        cluster_token="wb_cluster_test",
    )


def run_id() -> str:
    return ids.new_id("run")


def alive(pid: int) -> bool:
    stat = proc.read_stat(pid)
    return stat is not None and not stat.ended


def tagged(home: Path) -> list[int]:
    """Living processes that some agent of this home started."""
    wanted = str(home.resolve())
    return [
        stat.pid
        for stat in proc.all_stats()
        if not stat.ended
        and (environment := proc.read_environment(stat.pid)).get("WHIMBREL_HOME") == wanted
        and "WHIMBREL_EPOCH" in environment
    ]


def kill_tagged(home: Path) -> None:
    """What a test left behind."""
    for pid in tagged(home):
        os.kill(pid, signal.SIGKILL)


def wait_for(condition: Callable[[], bool], *, within_s: float = 15.0, what: str = "condition") -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {within_s:.0f} s"
        time.sleep(0.03)
