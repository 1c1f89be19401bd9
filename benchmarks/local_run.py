"""A real run on a local cluster in a folder of its own, for benchmarks to look at or to hurt."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from api.cli.local import LocalCluster
from api.cli.session import client_of, create_run, load_spec, local_cluster, prepare, wait_nodes
from api.client import Client
from whimbrel.coordination import free_port
from whimbrel.settings import Settings


@dataclass(frozen=True)
class LocalRun:
    cluster: LocalCluster
    client: Client
    run_id: str


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextmanager
def local_run(run_file: str, *, max_steps: int | None, nodes: int = 3) -> Iterator[LocalRun]:
    """Start a cluster and a run; everything is ended and removed on the way out.

    The built-in model is made once in the usual home and linked, so that a benchmark does not pay for it.
    """
    spec = load_spec(Path(run_file), seed=None, max_steps=max_steps)
    usual = Settings()
    prepare(spec, usual.home.resolve())
    with tempfile.TemporaryDirectory(prefix="whimbrel-bench-") as folder:
        home = Path(folder)
        models = usual.home.resolve() / "models"
        if models.is_dir():
            (home / "models").symlink_to(models)
        settings = Settings(home=home)
        ports = {"port": free_port(), "etcd_port": free_port()}
        with local_cluster(settings, nodes=nodes, say=say, **ports) as cluster, client_of(cluster) as client:
            wait_nodes(client, nodes)
            run = create_run(client, spec)
            yield LocalRun(cluster, client, run["id"])
