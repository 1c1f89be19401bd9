"""`whimbrel events`: what happens, as it happens."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from api.cli.connect import connect
from api.cli.output import Format, Output, emit, print_data, say
from api.client import follow_events
from whimbrel.limits import PAGE_DEFAULT


def event_line(event: dict[str, Any]) -> str:
    """One event on one line."""
    about = " ".join(part for part in (event["run_name"] or event["run_id"] or "", event["subject"]) if part)
    return f"{event['at'][11:19]}  {event['severity']:<7}  {event['kind']:<22}  {about:<28}  {event['message']}"


def events(
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with new events until interrupted.")] = False,
    run: Annotated[str, typer.Option("--run", help="Only of this run (name or id).")] = "",
    after: Annotated[int | None, typer.Option(help="Only events after this id.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=500, help="At most this many before following.")] = PAGE_DEFAULT,
    output: Output = Format.TABLE,
) -> None:
    """Print events, oldest first; with -f go on as they happen, also over a restart of the controller."""
    with connect() as client:
        page = client.events(after=after, run=run, limit=limit)
        if not follow and output is not Format.TABLE:
            _print_page(page["items"], output)
            return
        for event in page["items"]:
            _print_event(event, output)
        if not follow:
            return
        stream = follow_events(client, run=run, after=page["next_after"], on_break=lambda reason: say(f"… {reason}"))
        for event in stream:
            _print_event(event, output)


def _print_page(items: list[dict[str, Any]], output: Format) -> None:
    if output is Format.NAME:
        for event in items:
            emit(str(event["id"]))
    else:
        print_data(items, output)


def _print_event(event: dict[str, Any], output: Format) -> None:
    """While following, each event is a document of its own: one JSON line, one YAML document."""
    if output is Format.TABLE:
        emit(event_line(event))
    elif output is Format.NAME:
        emit(str(event["id"]))
    elif output is Format.YAML:
        emit("---")
        print_data(event, output)
    else:
        emit(json.dumps(event, ensure_ascii=False))
