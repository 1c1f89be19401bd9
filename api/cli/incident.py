"""`whimbrel incident`: what failed, what was done about it, what it cost."""

from __future__ import annotations

from typing import Annotated

import typer

from api.cli.connect import connect
from api.cli.output import Column, Format, Output, age, print_item, print_items, seconds

app = typer.Typer(no_args_is_help=True)

_COLUMNS: list[Column] = [
    ("INCIDENT", lambda incident: incident["id"]),
    ("KIND", lambda incident: incident["kind"]),
    ("RUN", lambda incident: incident["run_name"] or "-"),
    ("WORKER", lambda incident: incident["worker"] or "-"),
    ("AGO", lambda incident: age(incident["detected_at"])),
    ("DETECT", lambda incident: seconds(incident["seconds"]["detect"])),
    ("RECOVER", lambda incident: "open" if incident["open"] else seconds(incident["seconds"]["recover"])),
    ("WHAT", lambda incident: incident["message"]),
]
_FIELDS: list[Column] = [
    *_COLUMNS,
    ("NODE", lambda incident: incident["node"] or "-"),
    ("DECISION", lambda incident: incident["decision"] or "-"),
    ("FAILED", lambda incident: incident["failed_at"] or "-"),
    ("DETECTED", lambda incident: incident["detected_at"] or "-"),
    ("DECIDED", lambda incident: incident["decided_at"] or "-"),
    ("RECOVERED", lambda incident: incident["recovered_at"] or "not yet"),
    ("TOTAL", lambda incident: seconds(incident["seconds"]["total"])),
    ("COST", lambda incident: ", ".join(f"{key} {value}" for key, value in incident["cost"].items()) or "-"),
]


@app.command("ls")
def list_incidents(
    run: Annotated[str, typer.Option("--run", help="Only of this run (name or id).")] = "",
    limit: Annotated[int, typer.Option(min=1, help="At most this many, newest first.")] = 50,
    output: Output = Format.TABLE,
) -> None:
    """List incidents, newest first."""
    with connect() as client:
        incidents = client.incidents(run=run, limit=limit)
    print_items(incidents, _COLUMNS, output, name="id", empty="Nothing has failed.")


@app.command("show")
def show_incident(
    incident: Annotated[str, typer.Argument(help="The incident's id.")], output: Output = Format.TABLE
) -> None:
    """Show one incident with its times, decision and cost."""
    with connect() as client:
        print_item(client.incident(incident), _FIELDS, output, name="id")
