"""`whimbrel agent`: the node's daemon, which is a program of its own."""

from __future__ import annotations

import os
import sys

import typer


def agent(context: typer.Context) -> None:
    """Run the node agent; all options go to `python -m agents.daemon`."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "agents.daemon", *context.args])  # noqa: S606 - our own program
