"""What `up` promises of processes: it finds what a killed one left behind, and ends nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from api.cli.local import SUPERVISOR, end_left_behind
from api.cli.session import uninterrupted

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
