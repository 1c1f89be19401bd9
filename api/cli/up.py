"""`whimbrel up`: everything on this machine, and optionally one run to its end."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from typing import Annotated, Final

import typer

from api.cli.local import LocalCluster
from api.cli.session import (
    Follower,
    client_of,
    create_run,
    exit_code_of,
    is_final,
    load_spec,
    local_cluster,
    prepare,
    summarise,
    wait_nodes,
)
from api.http.session import mint_login_link
from whimbrel.errors import EXIT_OK
from whimbrel.settings import Settings

DEFAULT_NODES: Final = 3
"""One for the trainer and one for each rollout of the examples, so that losing a node means something."""
DEFAULT_PORT: Final = 8600
DEFAULT_ETCD_PORT: Final = 2389
"""Beside etcd's usual 2379, so that a cluster of the user's own is not met by accident."""

RunFile = Annotated[Path | None, typer.Argument(help="Run file to start and follow; without one, only serve.")]
Nodes = Annotated[int, typer.Option(min=1, max=64, help="Node agents to start on this machine.")]
Port = Annotated[int, typer.Option(min=1, max=65535, help="Port of API and dashboard.")]
EtcdPort = Annotated[int, typer.Option(min=1, max=65535, help="Client port of the private etcd.")]
Keep = Annotated[bool, typer.Option("--keep", help="Go on serving after the run has ended.")]
Seed = Annotated[int | None, typer.Option(help="Override the run file's seed.")]
MaxSteps = Annotated[int | None, typer.Option(min=1, help="Override the run file's max_steps.")]


def up(
    run_file: RunFile = None,
    nodes: Nodes = DEFAULT_NODES,
    port: Port = DEFAULT_PORT,
    etcd_port: EtcdPort = DEFAULT_ETCD_PORT,
    keep: Keep = False,
    seed: Seed = None,
    max_steps: MaxSteps = None,
) -> None:
    """Start etcd, a controller and node agents on this machine; run a run file to its end.

    Without a run file it serves until Ctrl-C. With one it exits when the run has ended: 0 if it reached its target.
    """
    settings = Settings()
    spec = load_spec(run_file, seed=seed, max_steps=max_steps) if run_file is not None else None
    stop_on_sigterm()
    if spec is not None:
        prepare(spec, settings.home.resolve())
    say("starting etcd, the controller and " + (f"{nodes} node agents" if nodes > 1 else "a node agent"))
    with local_cluster(settings, nodes=nodes, port=port, etcd_port=etcd_port, say=say) as cluster:
        say(f"dashboard  {dashboard_url(cluster)}")
        if spec is None:
            say(f"next       {_exports(settings, cluster)}whimbrel run start FILE   (Ctrl-C ends everything)")
            _serve()
            return
        with client_of(cluster) as client:
            wait_nodes(client, nodes)
            run = create_run(client, spec)
            say(f"run        {run['name']} ({run['id']})")
            for other in client.runs():
                if other["id"] != run["id"] and other["desired"] == "running" and not is_final(other):
                    say(
                        f"           {other['name']} goes on beside it; end it with `whimbrel run stop {other['name']}`"
                    )
            run = Follower(client, run["id"], say).until_end()
            figures = summarise(client, run, say)
        if keep:
            say(f"serving on at {cluster.url}; Ctrl-C ends everything")
            _serve()
        code = exit_code_of(figures)
    if code != EXIT_OK:
        raise typer.Exit(code)


def dashboard_url(cluster: LocalCluster) -> str:
    """A link that logs one browser in once; after that the page asks for the token in HOME/tokens/admin."""
    return mint_login_link(cluster.url, cluster.admin_token)


def say(line: str) -> None:
    """Talk goes to standard error; data would go to standard output."""
    print(line, file=sys.stderr, flush=True)  # noqa: T201


def stop_on_sigterm() -> None:
    """Let SIGTERM end things the way Ctrl-C does."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


def _exports(settings: Settings, cluster: LocalCluster) -> str:
    """What another shell must set to find this cluster, unless the defaults or its environment say so already."""
    needed = []
    if settings.controller != cluster.url:
        needed.append(f"WHIMBREL_CONTROLLER={cluster.url}")
    if settings.home.resolve() != Path(".whimbrel").resolve():
        needed.append(f"WHIMBREL_HOME={cluster.home}")
    return f"export {' '.join(needed)}; " if needed else ""


def _serve() -> None:
    while True:
        time.sleep(3600)
