"""`whimbrel drill`: a run on this machine while its parts are killed in turn, with a table of what it cost."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from api.cli.faults import DRILL, FAULTS, Director, Fault, Verdict, seconds
from api.cli.session import (
    Follower,
    client_of,
    create_run,
    exit_code_of,
    load_spec,
    local_cluster,
    prepare,
    summarise,
    wait_nodes,
)
from api.cli.up import (
    DEFAULT_ETCD_PORT,
    DEFAULT_NODES,
    DEFAULT_PORT,
    EtcdPort,
    MaxSteps,
    Nodes,
    Port,
    Seed,
    dashboard_url,
    say,
    stop_on_sigterm,
)
from whimbrel.errors import EXIT_FAILED, EXIT_OK, UsageError
from whimbrel.settings import Settings

Faults = Annotated[
    str | None,
    typer.Option(
        help="Comma-separated faults, e.g. 'kill trainer,pause etcd'; `all` for every one. Default: four kills."
    ),
]


def drill(
    run_file: Annotated[Path, typer.Argument(help="Run file.")],
    faults: Faults = None,
    nodes: Nodes = DEFAULT_NODES,
    port: Port = DEFAULT_PORT,
    etcd_port: EtcdPort = DEFAULT_ETCD_PORT,
    seed: Seed = None,
    max_steps: MaxSteps = None,
) -> None:
    """Run a run file on this machine and kill a rollout, the trainer, the controller and etcd meanwhile.

    Ends with a table of what was killed, how soon it was detected and recovered, and what was lost. Exits with 0 only
    if the run reached its target and nothing was lost.
    """
    chosen = choose_faults(faults)
    settings = Settings()
    spec = load_spec(run_file, seed=seed, max_steps=max_steps)
    stop_on_sigterm()
    prepare(spec, settings.home.resolve())
    say("starting etcd, the controller and node agents")
    with local_cluster(settings, nodes=nodes, port=port, etcd_port=etcd_port, say=say) as cluster:
        say(f"dashboard  {dashboard_url(cluster)}")
        with client_of(cluster) as client:
            wait_nodes(client, nodes)
            run = create_run(client, spec)
            say(f"run        {run['name']} ({run['id']})")
            director = Director(cluster, client, run["id"], say)
            verdicts: list[Verdict] = []
            thread = threading.Thread(target=lambda: verdicts.extend(director.play(chosen)), daemon=True)
            thread.start()
            run = Follower(client, run["id"], say).until_end()
            thread.join(timeout=5.0)
            figures = summarise(client, run, say)
            audit = client.audit(run["id"])
    Console().print(verdict_table(verdicts, audit, figures["ettr"]))
    survived = len(verdicts) == len(chosen) and all(verdict.survived for verdict in verdicts)
    survived = survived and audit["trajectories_lost"] == audit["consumed_twice"] == 0
    if len(verdicts) < len(chosen):
        say("the run ended before every fault was injected; give it more steps with --max-steps")
    code = exit_code_of(figures) if survived else EXIT_FAILED
    if code != EXIT_OK:
        raise typer.Exit(code)


def choose_faults(text: str | None) -> tuple[Fault, ...]:
    """The faults that a comma-separated list names.

    Raises:
        UsageError: one of them is not known.
    """
    if text is None:
        return DRILL
    if text == "all":
        return FAULTS
    known = {fault.name: fault for fault in FAULTS}
    names = [part.strip() for part in text.split(",") if part.strip()]
    for name in names:
        if name not in known:
            raise UsageError(f"There is no fault {name!r}.", hint=f"Known: {', '.join(known)}.")
    return tuple(known[name] for name in names)


def verdict_table(verdicts: Sequence[Verdict], audit: dict[str, object], ettr: float | None) -> Table:
    """The drill's result, as people read it."""
    lost, twice = audit["trajectories_lost"], audit["consumed_twice"]
    caption = f"trajectories lost {lost}, consumed twice {twice}"
    if ettr is not None:
        caption += f", ETTR {ettr:.3f}"
    table = Table(title="drill: seconds after the fault, steps lost and replayed", caption=caption, box=box.SIMPLE_HEAD)
    table.add_column("fault", no_wrap=True)
    for heading in ("detected", "recovered", "lost", "replayed", "bits"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("verdict")
    for verdict in verdicts:
        same = {True: "same", False: "OTHER", None: "-"}[verdict.state_digest_equal]
        table.add_row(
            verdict.fault.name,
            seconds(verdict.detect_s),
            seconds(verdict.recover_s),
            str(verdict.lost_steps),
            str(verdict.replayed_steps),
            same,
            "survived" if verdict.survived else verdict.problem or "lost something",
        )
    return table
