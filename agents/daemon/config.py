"""One agent's configuration, from settings and command line, checked before anything starts."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass
from pathlib import Path

import psutil

from whimbrel import ids
from whimbrel.errors import Unauthorized, UsageError
from whimbrel.settings import Settings
from whimbrel.wire.cluster import Resources

_NVIDIA = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True)
class AgentConfig:
    """Everything an agent is told; all paths are absolute."""

    node_id: str
    home: Path
    store: Path
    etcd_endpoints: tuple[str, ...]
    controller: str
    cluster_token: str
    region: str = "local"
    slots: int = 4
    host: str = "127.0.0.1"
    """Where the chunk server listens; also what is announced, unless `advertise` says otherwise."""
    port: int = 0
    """0: a free one."""
    advertise: str = ""
    keep_workers: bool = False
    """SIGTERM leaves the workers for the next agent, as SIGHUP always does."""
    log_level: str = "info"

    @property
    def node_home(self) -> Path:
        return self.home / "nodes" / self.node_id

    @property
    def workers(self) -> Path:
        return self.node_home / "workers"

    @property
    def cache(self) -> Path:
        return self.node_home / "cache"


def make_config(
    settings: Settings,
    *,
    node: str = "",
    region: str = "",
    slots: int = 0,
    host: str = "127.0.0.1",
    port: int = 0,
    advertise: str = "",
    keep_workers: bool = False,
) -> AgentConfig:
    """Settings with the command line's options over them.

    Raises:
        UsageError: the node's name cannot be one, or there is nothing to announce.
        Unauthorized: there is no cluster token.
    """
    node_id = node or settings.node or default_node_name()
    if not ids.is_name(node_id):
        raise UsageError(
            f"{node_id!r} cannot name a node.", hint="Use lower case letters, digits and inner hyphens (--node)."
        )
    token = settings.read_cluster_token()
    if not token:
        raise Unauthorized(
            f"There is no cluster token below {settings.home.resolve()}.",
            hint="Copy tokens/cluster from the controller's machine, or set WHIMBREL_CLUSTER_TOKEN.",
        )
    if host in ("0.0.0.0", "::") and not advertise:  # noqa: S104 - compared, not bound
        raise UsageError(f"--host {host} is no address that others can use.", hint="Add --advertise HOST.")
    return AgentConfig(
        node_id=node_id,
        home=settings.home.resolve(),
        store=settings.store_path.resolve(),
        etcd_endpoints=tuple(settings.etcd_endpoints),
        controller=settings.controller.rstrip("/"),
        cluster_token=token,
        region=region or settings.region,
        slots=slots or settings.slots,
        host=host,
        port=port,
        advertise=advertise,
        keep_workers=keep_workers,
        log_level=settings.log_level,
    )


def default_node_name() -> str:
    """The host's name, made fit to name a node."""
    name = re.sub(r"[^a-z0-9-]+", "-", socket.gethostname().partition(".")[0].lower()).strip("-")
    return name[:64].rstrip("-") or "node"


def measure_resources(slots: int) -> Resources:
    """What this machine has."""
    gpus = sorted(_NVIDIA.iterdir()) if _NVIDIA.is_dir() else []
    return Resources(
        cpus=psutil.cpu_count() or 1,
        memory_bytes=psutil.virtual_memory().total,
        gpus=len(gpus),
        gpu_name=_gpu_name(gpus[0]) if gpus else "",
        slots=slots,
    )


def _gpu_name(folder: Path) -> str:
    try:
        text = (folder / "information").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    found = re.search(r"^Model:\s*(.+)$", text, re.MULTILINE)
    return found.group(1).strip() if found else ""
