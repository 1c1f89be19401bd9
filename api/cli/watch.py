"""The live view of a run: polls its status, prints on a terminal in place, elsewhere a line per change."""

from __future__ import annotations

import sys
import time
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from api.cli.events import event_line
from api.cli.output import emit, number, say, seconds
from api.client import Client
from whimbrel.errors import EXIT_FAILED, EXIT_OK, Unreachable
from whimbrel.limits import PROGRESS_EVERY_S

_TERMINAL = frozenset({"completed", "failed", "stopped"})
_EVENTS_SHOWN = 6


def watch_run(client: Client, ref: str) -> int:
    """Follow a run to its end; returns the exit code: 0 completed, 1 failed or stopped.

    A controller that is away is waited for: the run goes on without it.

    Raises:
        NotFound, Unreachable: at the first look only.
    """
    view = _View(client, client.run(ref))
    if sys.stdout.isatty():
        with Live(view.render(), console=Console(), refresh_per_second=4, transient=False) as live:
            while not view.ended:
                time.sleep(PROGRESS_EVERY_S)
                view.refresh()
                live.update(view.render())
    else:
        view.print_change()
        while not view.ended:
            time.sleep(PROGRESS_EVERY_S)
            view.refresh()
            view.print_change()
    status = view.run["status"]
    say(f"Run {view.run['name']} {status['state']}: {status['reason']}")
    return EXIT_OK if status["state"] == "completed" else EXIT_FAILED


class _View:
    """What is known of the run, and how it looks."""

    def __init__(self, client: Client, run: dict[str, Any]) -> None:
        self.run = run
        self._client = client
        self._workers: list[dict[str, Any]] = []
        self._events: list[dict[str, Any]] = []
        self._after: int | None = None
        self._away = ""
        self._printed: tuple[Any, ...] = ()
        self._read_parts()

    @property
    def ended(self) -> bool:
        return self.run["status"]["state"] in _TERMINAL

    def refresh(self) -> None:
        """Look again; remember when the controller does not answer."""
        try:
            self.run = self._client.run(self.run["id"])
            self._read_parts()
            self._away = ""
        except Unreachable as error:
            self._away = error.message

    def render(self) -> Group:
        """The whole view."""
        status = self.run["status"]
        version, target = max(status["head_version"], 0), status["max_steps"]
        head = Text.assemble((self.run["name"], "bold"), f"  {status['state']}  ", (status["reason"], "dim"))
        progress = Table.grid(padding=(0, 1))
        progress.add_row(ProgressBar(total=target, completed=version, width=40), f"{version}/{target}")
        figures = Text(
            f"reward {number(status['reward'])}   tokens/s {number(status['tokens_per_s'], 0)}   "
            f"staleness {number(status['staleness_max'], 0)}   recoveries {status['recoveries']}   "
            f"ETTR {number(status['ettr'])}   ETA {seconds(status['eta_seconds'])}"
        )
        parts: list[Any] = [head, progress, figures, self._worker_table()]
        parts += [Text(event_line(event), style=_style(event), no_wrap=True) for event in self._events]
        if self._away:
            parts.append(Text(f"{self._away} The run goes on; waiting for the controller.", style="yellow"))
        return Group(*parts)

    def print_change(self) -> None:
        """One plain line when state or version changed."""
        status = self.run["status"]
        key = (status["state"], status["head_version"])
        if key == self._printed:
            return
        self._printed = key
        emit(
            f"{self.run['name']}  {status['state']}  step {max(status['head_version'], 0)}/{status['max_steps']}"
            f"  reward {number(status['reward'])}  tokens/s {number(status['tokens_per_s'], 0)}"
        )
        sys.stdout.flush()

    def _worker_table(self) -> Table:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for heading in ("WORKER", "STATE", "PHASE", "NODE", "VERSION", "RESTARTS"):
            table.add_column(heading)
        for worker in self._workers:
            table.add_row(
                worker["worker"],
                worker["state"],
                worker["phase"] or "-",
                worker["node"] or "-",
                str(worker["policy_version"]),
                str(worker["restarts"]),
            )
        return table

    def _read_parts(self) -> None:
        self._workers = self._client.workers(self.run["id"])
        page = self._client.events(after=self._after, run=self.run["id"])
        self._events = [*self._events, *page["items"]][-_EVENTS_SHOWN:]
        self._after = page["next_after"]


def _style(event: dict[str, Any]) -> str:
    return {"error": "red", "warning": "yellow"}.get(event["severity"], "dim")
