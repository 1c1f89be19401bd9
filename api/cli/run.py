"""`whimbrel run`: what a user does with a run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from api.cli.connect import connect
from api.cli.output import Column, Format, Output, age, emit, number, print_item, print_items, say, seconds
from api.cli.watch import watch_run
from api.client import Client
from whimbrel.errors import EXIT_FAILED
from whimbrel.ids import new_id
from whimbrel.limits import LOG_TAIL_BYTES, PROGRESS_EVERY_S
from whimbrel.spec import load_run_file

app = typer.Typer(no_args_is_help=True)

RunRef = Annotated[str, typer.Argument(metavar="RUN", help="The run's name or id.")]
RunFile = Annotated[Path, typer.Argument(metavar="FILE", help="The run file (TOML).")]

_COLUMNS: list[Column] = [
    ("NAME", lambda run: run["name"]),
    ("STATE", lambda run: run["status"]["state"]),
    ("STEP", lambda run: f"{max(run['status']['head_version'], 0)}/{run['status']['max_steps']}"),
    ("REWARD", lambda run: number(run["status"]["reward"])),
    ("TOKENS/S", lambda run: number(run["status"]["tokens_per_s"], 0)),
    ("STALENESS", lambda run: number(run["status"]["staleness_max"], 0)),
    ("RECOVERIES", lambda run: str(run["status"]["recoveries"])),
    ("ETTR", lambda run: number(run["status"]["ettr"])),
    ("ETA", lambda run: seconds(run["status"]["eta_seconds"])),
    ("AGE", lambda run: age(run["created_at"])),
]
_FIELDS: list[Column] = [
    ("ID", lambda run: run["id"]),
    *_COLUMNS[:2],
    ("REASON", lambda run: run["status"]["reason"] or "-"),
    *_COLUMNS[2:],
    ("WORKERS", lambda run: f"{run['status']['workers_running']} of {run['status']['workers_total']} running"),
    ("OPEN INCIDENTS", lambda run: str(run["status"]["open_incidents"])),
    ("MODEL", lambda run: run["spec"]["model"]),
    ("CREATED", lambda run: run["created_at"]),
    ("FINISHED", lambda run: run["finished_at"] or "-"),
    ("CONDITIONS", lambda run: "; ".join(f"{one['type']}={one['status']}" for one in run["conditions"]) or "-"),
]
_AUDIT_FIELDS = ("issued", "consumed", "batched", "buffered", "leased", "pooled", "dropped", "balance")


@app.command("start")
def start(
    file: RunFile,
    watch: Annotated[bool, typer.Option("--watch", help="Follow the run to its end.")] = False,
    output: Output = Format.TABLE,
) -> None:
    """Create a run from a run file and start it."""
    spec = load_run_file(file)
    with connect() as client:
        run = client.start_run(spec.model_dump(mode="json"), idempotency_key=new_id("key"))
        if output is Format.TABLE:
            emit(f"run {run['name']} created ({run['id']})")
        else:
            print_items([run], _COLUMNS, output, name="id")
        say(f"dashboard: {client.url}/runs/{run['id']}")
        say("next:")
        for verb in ("watch", "logs -f", "stop"):
            say(f"  whimbrel run {verb} {run['name']}")
        if watch:
            raise typer.Exit(watch_run(client, run["id"]))


@app.command("ls")
def list_runs(
    state: Annotated[str, typer.Option(help="Only runs in this state.")] = "",
    limit: Annotated[int, typer.Option(min=1, help="At most this many, newest first.")] = 50,
    output: Output = Format.TABLE,
) -> None:
    """List runs, newest first."""
    with connect() as client:
        runs = client.runs(state=state, limit=limit)
    empty = "No runs yet. Start one: `whimbrel run check FILE`, then `whimbrel run start FILE`."
    print_items(runs, _COLUMNS, output, name="name", empty=empty)


@app.command("show")
def show(run: RunRef, output: Output = Format.TABLE) -> None:
    """Show one run."""
    with connect() as client:
        print_item(client.run(run), _FIELDS, output, name="name")


@app.command("watch")
def watch(run: RunRef) -> None:
    """Follow a run to its end; exits with 0 when it completed, 1 otherwise."""
    with connect() as client:
        raise typer.Exit(watch_run(client, run))


@app.command("stop")
def stop(run: RunRef) -> None:
    """Stop a run for good; what was committed stays."""
    _act(run, "stop", "is being stopped")


@app.command("pause")
def pause(run: RunRef) -> None:
    """Hold a run: no new work, no new step; the workers stay."""
    _act(run, "pause", "is being paused")


@app.command("resume")
def resume(run: RunRef) -> None:
    """Let a paused run go on."""
    _act(run, "resume", "is told to go on")


@app.command("logs")
def logs(
    run: RunRef,
    worker: Annotated[str, typer.Option("--worker", "-w", help="The worker, e.g. trainer or rollout-0.")] = "trainer",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with new lines until interrupted.")] = False,
    tail: Annotated[int, typer.Option(min=1, max=LOG_TAIL_BYTES, help="Bytes from the end to begin with.")] = 16_384,
) -> None:
    """Print the end of a worker's log."""
    with connect() as client:
        answer = client.logs(run, worker, tail_bytes=tail)
        _write(answer["text"])
        if not answer["text"]:
            say(f"{worker} has written nothing yet.")
        if follow:
            _follow_log(client, run, worker, answer)


@app.command("audit")
def audit(run: RunRef, output: Output = Format.TABLE) -> None:
    """Print the ledger's balance: every prompt group that was issued is somewhere. Exits with 1 if it is off."""
    with connect() as client:
        balance = client.audit(run)
    if output is Format.TABLE:
        for field in _AUDIT_FIELDS:
            emit(f"{field:<9} {balance[field]:>10,}")
        for reason, count in balance["dropped_reasons"].items():
            emit(f"  dropped: {reason} {count:,}")
    else:
        print_item(balance, [], output, name="run_id")
    if not (balance["balanced"] and balance["sound"]):
        say(
            f"error: The ledger of {run} is off: {balance['balance']} groups missing, {balance['consumed_twice']} used "
            f"twice, {balance['too_stale']} too stale, {balance['trajectories_lost']} trajectories lost."
        )
        say(f"hint: Keep the database and look at `whimbrel events --run {run}`; this is a defect worth reporting.")
        raise typer.Exit(EXIT_FAILED)
    say("The ledger adds up.")


@app.command("check")
def check(file: RunFile, output: Output = Format.TABLE) -> None:
    """Validate a run file without starting anything."""
    spec = load_run_file(file)
    if output is Format.TABLE:
        say(f"{file} is valid: {spec.name}, {spec.max_steps} steps of {spec.groups_per_step} prompt groups.")
    else:
        print_item(spec.model_dump(mode="json"), [], output, name="name")


def _act(run: str, verb: str, outcome: str) -> None:
    with connect() as client:
        answer = client.act(run, verb)
    say(f"Run {answer['name']} {outcome}; see `whimbrel run show {answer['name']}`.")


def _follow_log(client: Client, run: str, worker: str, seen: dict[str, object]) -> None:
    """Poll the log's end and print what is new; a new epoch of the worker begins a new log."""
    epoch, size_bytes = seen["epoch"], int(str(seen["size_bytes"]))
    while True:
        time.sleep(PROGRESS_EVERY_S)
        answer = client.logs(run, worker, tail_bytes=LOG_TAIL_BYTES)
        if answer["epoch"] != epoch or answer["size_bytes"] < size_bytes:
            say(f"… {worker} began a new log (epoch {answer['epoch']})")
            epoch, size_bytes = answer["epoch"], 0
        new_bytes = answer["size_bytes"] - size_bytes
        if new_bytes > 0:
            _write(answer["text"].encode()[-new_bytes:].decode(errors="replace"))
            size_bytes = answer["size_bytes"]


def _write(text: str) -> None:
    if text:
        emit(text.rstrip("\n"))
