"""Where things are and who we are: from the environment (`WHIMBREL_…`), with defaults that suit one machine."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """Settings of one process. Command-line options override them, they override the defaults."""

    model_config = SettingsConfigDict(env_prefix="WHIMBREL_", extra="ignore")

    home: Path = Path(".whimbrel")
    """Everything that Whimbrel keeps on this machine."""
    etcd: str = "127.0.0.1:2379"
    """Comma-separated host:port of etcd's client endpoints."""
    controller: str = "http://127.0.0.1:8600"
    """URL of the controller, as agents, workers and the CLI reach it."""
    database: str = ""
    """SQLAlchemy URL; empty means SQLite below `home`."""
    store: str = ""
    """Folder of the weight log; empty means `home`/store. All trainer nodes must share it."""
    cluster_token: str = ""
    """Shared secret of controller, agents and workers; empty means the file below `home`."""
    token: str = ""
    """Admin token for API and CLI; empty means the file below `home`."""
    node: str = ""
    """This node's name; empty means the host's name."""
    region: str = "local"
    slots: int = Field(default=4, ge=1)
    log_level: str = "info"

    @property
    def etcd_endpoints(self) -> list[str]:
        return [part.strip() for part in self.etcd.split(",") if part.strip()]

    @property
    def database_url(self) -> str:
        return self.database or f"sqlite+aiosqlite:///{(self.home / 'controller.db').resolve()}"

    @property
    def store_path(self) -> Path:
        return Path(self.store) if self.store else self.home / "store"

    def read_cluster_token(self, *, create: bool = False) -> str:
        """The cluster token from the environment or its file; `create` makes the file (0600) when there is none."""
        return self.cluster_token or _token_file(self.home / "tokens" / "cluster", "wb_cluster_", create=create)

    def read_admin_token(self, *, create: bool = False) -> str:
        """The admin token from the environment or its file; `create` makes the file (0600) when there is none."""
        return self.token or _token_file(self.home / "tokens" / "admin", "wb_admin_", create=create)


def _token_file(path: Path, prefix: str, *, create: bool) -> str:
    if path.exists():
        return path.read_text(encoding="ascii").strip()
    if not create:
        return ""
    path.parent.mkdir(parents=True, exist_ok=True)
    token = prefix + secrets.token_urlsafe(32)
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:  # another process of this machine was faster
        return path.read_text(encoding="ascii").strip()
    with os.fdopen(handle, "w", encoding="ascii") as file:
        file.write(token + "\n")
    return token
