"""A worker ends with the code that its agent understands, whatever else fails while it ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from whimbrel.errors import EXIT_FENCED

PROGRAM = """
import threading, time
from agents.worker import run_worker
from whimbrel.errors import Fenced
from agents import worker

class Context:
    def close(self):
        raise RuntimeError("etcd is away")

def main(context):
    threading.Thread(target=time.sleep, args=(60,)).start()  # a library's thread that would hold the process
    raise Fenced("Epoch 8 owns it now.")

worker.WorkerContext.start = Context
run_worker(main)
"""


def test_a_worker_that_cannot_write_how_it_ended_still_ends_with_its_code(tmp_path: Path) -> None:
    (tmp_path / "exit-0.json").mkdir()  # nothing can be written there, as on a full disk
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == EXIT_FENCED
    assert "Epoch 8 owns it now." in done.stderr
