"""Data on standard output, talk on standard error; tables only for a terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any, Final

import typer
import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

Json = Mapping[str, Any]
Column = tuple[str, Callable[[Json], str]]
"""Heading, and how to read the cell from an item."""

_STATE_MARKS = {
    "running": ("●", "green"),
    "ready": ("●", "green"),
    "completed": ("✓", "green"),
    "ok": ("✓", "green"),
    "starting": ("◔", "cyan"),
    "pending": ("○", "cyan"),
    "recovering": ("◑", "yellow"),
    "paused": ("‖", "yellow"),
    "draining": ("◑", "yellow"),
    "cordoned": ("‖", "yellow"),
    "warn": ("!", "yellow"),
    "unreachable": ("?", "red"),
    "lost": ("✗", "red"),
    "failed": ("✗", "red"),
    "fail": ("✗", "red"),
    "stopped": ("■", "dim"),
}
"""Colour plus shape plus word for each state."""

GAP: Final = 2
"""Blanks between two columns."""
SENTENCE_OVER: Final = 40
"""A column wider than this holds sentences, which may be wrapped; a narrower one holds names and figures, which may not."""
SENTENCE_LEAST: Final = 20
"""A sentence that is wrapped into less than this is no fun to read."""


class Format(StrEnum):
    """How data is printed."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"
    NAME = "name"


Output = Annotated[Format, typer.Option("--output", "-o", help="How to print the data.", show_default=True)]


def say(text: str) -> None:
    """Talk to the user: on standard error, never mixed with data."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(Text(text))


def emit(line: str) -> None:
    """One plain line of data."""
    sys.stdout.write(line + "\n")


def print_items(
    items: Sequence[Json], columns: Sequence[Column], form: Format, *, name: str, empty: str = "Nothing yet."
) -> None:
    """A list of resources; `name` is the member that `-o name` prints."""
    if form is not Format.TABLE:
        _print_data(list(items), form, [str(item[name]) for item in items])
        return
    if not items:
        say(empty)
        return
    rows = [[read(item) for _, read in columns] for item in items]
    headings = [heading for heading, _ in columns]
    if sys.stdout.isatty():
        _print_table(headings, rows)
        return
    _print_columns([headings, *rows])


def print_item(item: Json, fields: Sequence[Column], form: Format, *, name: str) -> None:
    """One resource, as lines of label and value."""
    if form is not Format.TABLE:
        _print_data(dict(item), form, [str(item[name])])
        return
    rows = [(label, read(item)) for label, read in fields]
    width = max(len(label) for label, _ in rows)
    if sys.stdout.isatty():
        console = Console(highlight=False, soft_wrap=True)
        for label, value in rows:
            console.print(Text(f"{label:<{width}}  ", style="dim"), _marked(value), sep="")
        return
    for label, value in rows:
        emit(f"{label:<{width}}  {value}")


def print_data(value: Any, form: Format) -> None:
    """Any JSON value as JSON or YAML."""
    _print_data(value, form, [])


def _print_data(value: Any, form: Format, names: list[str]) -> None:
    if form is Format.NAME:
        for name in names:
            emit(name)
    elif form is Format.YAML:
        sys.stdout.write(yaml.safe_dump(value, sort_keys=False, allow_unicode=True))
    else:
        emit(json.dumps(value, indent=2, ensure_ascii=False))


def _print_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table in the terminal's width: sentences are wrapped; figures without room are left out from the right, and told.

    A name that is cut in the middle cannot be read, nor copied into the next command.
    """
    console = Console(highlight=False)
    widths = [
        max(len(headings[column]), *(_marked(row[column]).cell_len for row in rows)) for column in range(len(headings))
    ]
    shown = _fitting(widths, console.width)
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    for column in shown:
        table.add_column(headings[column], overflow="fold", no_wrap=widths[column] <= SENTENCE_OVER)
    for row in rows:
        table.add_row(*[_marked(row[column]) for column in shown])
    console.print(table)
    left_out = [heading for column, heading in enumerate(headings) if column not in shown]
    if left_out:
        say(f"No room for {', '.join(left_out)}: widen the terminal, or use -o json.")


def _fitting(widths: Sequence[int], room: int) -> list[int]:
    """The columns that have room: the first one, the sentences, and of the rest as many as fit, from the left."""
    least = [SENTENCE_LEAST if width > SENTENCE_OVER else width for width in widths]
    shown = list(range(len(widths)))
    spare = [column for column in shown[1:] if widths[column] <= SENTENCE_OVER]
    while spare and sum(least[column] for column in shown) + GAP * (len(shown) - 1) > room:
        shown.remove(spare.pop())
    return shown


def _print_columns(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        emit("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _marked(cell: str) -> Text:
    mark = _STATE_MARKS.get(cell)
    return Text(f"{mark[0]} {cell}", style=mark[1]) if mark else Text(cell)


# -- cells -------------------------------------------------------------------------------------------------------------


def number(value: float | None, digits: int = 3) -> str:
    """A number, or a dash where there is none yet."""
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.{digits}f}"


def seconds(value: float | None) -> str:
    """A duration as people read it."""
    if value is None:
        return "-"
    if value < 60:
        return f"{value:.1f}s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s"


def size(value: float | None) -> str:
    """Bytes in binary units."""
    if value is None:
        return "-"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def age(moment: str | None) -> str:
    """How long ago an RFC 3339 time was."""
    if not moment:
        return "-"
    return seconds(max(0.0, (datetime.now(UTC) - datetime.fromisoformat(moment)).total_seconds()))
