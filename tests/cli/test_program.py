"""The program as a process: what only a process shows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import whimbrel


def _run(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "WHIMBREL_HOME": str(home), "WHIMBREL_CONTROLLER": "http://127.0.0.1:1"}
    command = [sys.executable, "-m", "api.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)


def test_an_error_is_two_lines_on_stderr_and_an_exit_code(tmp_path: Path) -> None:
    done = _run(tmp_path, "run", "ls")
    assert (done.returncode, done.stdout) == (5, "")
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == ["error", "hint"]


def test_the_command_line_starts_without_torch_or_the_servers_packages(tmp_path: Path) -> None:
    heavy = ("torch", "transformers", "fastapi", "sqlalchemy", "numba")
    program = f"import sys, api.cli.main; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
    assert _run(tmp_path, "version").stdout.strip() == whimbrel.__version__
