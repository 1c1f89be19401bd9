"""Which controller this command talks to, and with which token."""

from __future__ import annotations

import os

from api.client import Client
from whimbrel.errors import UsageError
from whimbrel.settings import Settings


def choose_server(url: str) -> None:
    """Let `--server` win over the environment, for this process and the ones it starts."""
    if not url:
        return
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"--server {url} is no URL.", hint="Write it like http://127.0.0.1:8600.")
    os.environ["WHIMBREL_CONTROLLER"] = url


def connect() -> Client:
    """A client of the chosen controller."""
    settings = Settings()
    return Client(settings.controller, settings.read_admin_token())
