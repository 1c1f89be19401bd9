"""How a worker process is started: command and environment, the ones that torchrun would give."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable

from agents.daemon.assignments import Start
from agents.daemon.config import AgentConfig

Launch = Callable[[Start], list[str]]
"""The command of a worker's processes; tests put their own in."""


def module_command(action: Start) -> list[str]:
    """Whimbrel's own worker of the role."""
    return [sys.executable, "-m", f"agents.{action.role}"]


def launch_environment(
    config: AgentConfig, chunks: str, action: Start, rank: int, main_port: int, base: dict[str, str] | None = None
) -> dict[str, str]:
    """The environment of one rank. `chunks` is host:port of this node's chunk server.

    The agent's own settings do not pass on: among them may be the admin token or the database's password.
    """
    inherited = os.environ if base is None else base
    environment = {name: value for name, value in inherited.items() if not name.startswith("WHIMBREL_")}
    environment |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(action.ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(action.ranks),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(main_port),
        "TORCHELASTIC_RUN_ID": action.run_id,
        "TORCHELASTIC_RESTART_COUNT": str(max(0, action.start - 1)),
        "WHIMBREL_RUN_ID": action.run_id,
        "WHIMBREL_WORKER": action.worker,
        "WHIMBREL_ROLE": action.role,
        "WHIMBREL_EPOCH": str(action.epoch),
        "WHIMBREL_START": str(action.start),
        "WHIMBREL_NODE": config.node_id,
        "WHIMBREL_REGION": config.region,
        "WHIMBREL_ETCD": ",".join(config.etcd_endpoints),
        "WHIMBREL_CONTROLLER": config.controller,
        "WHIMBREL_CLUSTER_TOKEN": config.cluster_token,
        "WHIMBREL_STORE": str(config.store),
        "WHIMBREL_CACHE": str(config.cache),
        "WHIMBREL_CHUNKS": chunks,
        "WHIMBREL_SPEC_JSON": action.spec_json,
        "WHIMBREL_HOME": str(config.home),
        "WHIMBREL_LOG_LEVEL": config.log_level,
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
    }
    return environment


def free_port() -> int:
    """A TCP port of loopback that nobody listens on now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
