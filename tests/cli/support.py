"""The command line in this process: imports are most of what a process of its own would cost."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from api.cli.main import main

TOKEN = "secret"


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


class Cli:
    def __init__(self, home: Path, url: str) -> None:
        self.environment = {
            "WHIMBREL_HOME": str(home),
            "WHIMBREL_CONTROLLER": url,
            "WHIMBREL_TOKEN": TOKEN,
            "NO_COLOR": "1",
            "COLUMNS": "200",
        }

    def __call__(self, *arguments: str) -> Done:
        out, err = io.StringIO(), io.StringIO()
        with (
            pytest.MonkeyPatch.context() as patch,
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            for name in [name for name in os.environ if name.startswith("WHIMBREL_")]:
                patch.delenv(name)
            for name, value in self.environment.items():
                patch.setenv(name, value)
            patch.setattr(sys, "argv", ["whimbrel", *arguments])
            try:
                main()
            except SystemExit as end:
                return Done(int(end.code or 0), out.getvalue(), err.getvalue())
        return Done(0, out.getvalue(), err.getvalue())
