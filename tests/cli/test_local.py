"""What `up` promises of processes: it finds what a killed one left behind, and ends nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from api.cli import local
from api.cli.local import SUPERVISOR, Child, LocalCluster, end_left_behind
from api.cli.session import uninterrupted
from whimbrel.settings import Settings

Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[subprocess.Popen[bytes]] = []

    def begin(**environment: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", "print(flush=True); import time; time.sleep(60)"]
        process = subprocess.Popen(command, env=os.environ | environment, stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()  # it runs, with its own environment
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def test_the_next_up_ends_what_a_killed_one_left_and_nothing_else(tmp_path: Path, start: Start) -> None:
    home = str(tmp_path)
    left = start(WHIMBREL_HOME=home, **{SUPERVISOR: "1"})
    worker = start(WHIMBREL_HOME=home, WHIMBREL_EPOCH="7")
    others = [
        start(WHIMBREL_HOME=home),  # a user's shell
        start(WHIMBREL_HOME=home, **{SUPERVISOR: str(os.getpid())}),
        start(WHIMBREL_HOME=f"{home}/other", **{SUPERVISOR: "1"}),
    ]
    assert end_left_behind(tmp_path) == 2
    assert left.poll() is not None
    assert worker.poll() is not None
    assert [one.poll() for one in others] == [None, None, None]


def test_a_second_interruption_does_not_cut_the_ending_short() -> None:
    ended = False
    with uninterrupted():
        os.kill(os.getpid(), 2)
        ended = True
    assert ended


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_law_7_the_log_of_a_child_that_never_ends_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "LOG_BYTES_MAX", 5_000)
    program = "import time\nfor n in range(500): print(f'line {n:03} ' + 'x' * 100, flush=True); time.sleep(0.002)"
    child = Child("controller", [sys.executable, "-c", program], tmp_path / "controller.log")
    child.start()
    largest = 0
    while child.pid is not None:
        child.bound_log()
        largest = max(largest, child.log_path.stat().st_size)
        time.sleep(0.01)
    assert 0 < largest < 20_000
    assert "line 499" in child.last_lines() or "line 499" in (tmp_path / "controller.log.1").read_text()


def test_a_child_that_cannot_be_started_now_is_started_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        raise BrokenPipeError  # whoever read what `up` prints has gone

    monkeypatch.setattr(local, "RESTART_DELAY_S", 0.05)
    cluster = LocalCluster(Settings(home=tmp_path), nodes=0, port=1, etcd_port=1, say=say)
    child = Child("node-1", ["/nowhere/whimbrel"], tmp_path / "node-1.log")
    cluster.children = {"node-1": child}
    cluster._thread.start()
    time.sleep(0.5)
    child.command = [sys.executable, "-c", "import time; time.sleep(0.2)"]
    until(lambda: len(said) >= 2)
    cluster._stopping.set()
    cluster._thread.join(10)
    assert child.process is not None
    child.process.wait(10)
