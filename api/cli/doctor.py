"""`whimbrel doctor`: is this machine fit, and is the cluster there? Each line is ok, warn or fail, with what to do."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Literal
from urllib.parse import urlsplit

import typer

from api.cli.output import Column, Format, Output, print_items, say
from api.client import Client
from whimbrel.errors import EXIT_FAILED, WhimbrelError
from whimbrel.limits import CONNECT_TIMEOUT_S
from whimbrel.settings import Settings

DISK_LOW_BYTES: Final = 5 * 1024**3
"""Less free space than this is a warning: a chain of deltas and two snapshots of a small model already need it."""
_PYTHON: Final = (3, 11)
_PACKAGES: Final = {
    "httpx": "",
    "msgspec": "",
    "aetcd": "",
    "fastapi": "server",
    "sqlalchemy": "server",
    "uvicorn": "server",
    "torch": "node",
    "transformers": "node",
    "reasoning_gym": "tasks",
}
"""Import name, and the extra that brings it ("" for what every installation has)."""

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    check: str
    level: Level
    message: str
    hint: str = ""


_COLUMNS: list[Column] = [
    ("CHECK", lambda finding: finding["check"]),
    ("RESULT", lambda finding: finding["level"]),
    ("FOUND", lambda finding: finding["message"]),
]


def doctor(output: Output = Format.TABLE) -> None:
    """Look for what would stop Whimbrel on this machine; exits with 1 when something fails."""
    findings = list(examine(Settings()))
    print_items([asdict(one) for one in findings], _COLUMNS, output, name="check")
    if output is Format.TABLE:
        for one in findings:
            if one.hint:
                say(f"{one.check}: {one.hint}")
    if any(one.level == "fail" for one in findings):
        raise typer.Exit(EXIT_FAILED)


def examine(settings: Settings) -> Iterator[Finding]:
    """Run every check; one that breaks is a finding too."""
    yield _python()
    yield from _packages()
    yield _agents_package()
    checks: list[tuple[str, Callable[[Settings], Finding]]] = [
        ("etcd program", _etcd_program),
        ("home", _home),
        ("disk", _disk),
        ("admin token", lambda given: _token(given, "admin")),
        ("cluster token", lambda given: _token(given, "cluster")),
        ("etcd", _etcd),
        ("controller", _controller),
    ]
    for name, check in checks:
        try:
            yield check(settings)
        except (OSError, subprocess.SubprocessError, WhimbrelError) as error:
            yield Finding(name, "fail", getattr(error, "message", str(error)), getattr(error, "hint", ""))


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < _PYTHON:
        return Finding("python", "fail", version, f"Use Python {_PYTHON[0]}.{_PYTHON[1]} or newer.")
    return Finding("python", "ok", version)


def _packages() -> Iterator[Finding]:
    for name, extra in _PACKAGES.items():
        if importlib.util.find_spec(name) is not None:
            yield Finding(f"package {name}", "ok", _package_version(name))
        elif extra:
            hint = f'Needed for the part "{extra}": pip install "whimbrel[{extra}]".'
            yield Finding(f"package {name}", "warn", "not installed", hint)
        else:
            yield Finding(f"package {name}", "fail", "not installed", "Install whimbrel again.")


def _package_version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "installed"


def _agents_package() -> Finding:
    """Another distribution also installs a package called `agents`; whichever comes first on the path wins."""
    found = importlib.util.find_spec("agents")
    origin = Path(found.origin) if found is not None and found.origin else None
    ours = origin is not None and (origin.parent / "daemon" / "__init__.py").is_file()
    if not ours:
        where = f"is {origin}" if origin else "is missing"
        return Finding(
            "package agents", "fail", f"the package `agents` {where}", "Install whimbrel in a venv of its own."
        )
    try:
        rival = importlib.metadata.version("openai-agents")
    except importlib.metadata.PackageNotFoundError:
        return Finding("package agents", "ok", "ours")
    return Finding(
        "package agents",
        "warn",
        f"openai-agents {rival} installs a package called `agents` too",
        "Uninstall it here, or install whimbrel in a venv of its own.",
    )


def _etcd_program(_settings: Settings) -> Finding:
    path = shutil.which("etcd")
    if path is None:
        hint = "apt-get install etcd-server, or point WHIMBREL_ETCD at a cluster that runs already."
        return Finding("etcd program", "warn", "not on the PATH", hint)
    done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False)
    match = re.search(r"etcd Version: (\d+)\.(\d+)\.(\d+)", done.stdout + done.stderr)
    if match is None:
        return Finding("etcd program", "warn", f"{path} does not tell its version", "Try `etcd --version`.")
    version = tuple(int(part) for part in match.groups())
    text = f"{path} {'.'.join(map(str, version))}"
    if version < (3, 4, 0):
        return Finding("etcd program", "fail", text, "Use etcd 3.4 or newer.")
    return Finding("etcd program", "ok", text)


def _home(settings: Settings) -> Finding:
    home = settings.home.resolve()
    place = next(folder for folder in (home, *home.parents) if folder.exists())
    if not os.access(place, os.W_OK):
        return Finding("home", "fail", f"{place} is not writable", "Set WHIMBREL_HOME to a folder of yours.")
    return Finding("home", "ok", f"{home}{'' if home.exists() else ' (will be made)'}")


def _disk(settings: Settings) -> Finding:
    home = settings.home.resolve()
    place = next(folder for folder in (home, *home.parents) if folder.exists())
    free = shutil.disk_usage(place).free
    text = f"{free / 1024**3:.1f} GiB free at {place}"
    if free < DISK_LOW_BYTES:
        return Finding("disk", "warn", text, "Free some, or set WHIMBREL_HOME and WHIMBREL_STORE elsewhere.")
    return Finding("disk", "ok", text)


def _token(settings: Settings, kind: Literal["admin", "cluster"]) -> Finding:
    name = f"{kind} token"
    present = settings.read_admin_token() if kind == "admin" else settings.read_cluster_token()
    if not present:
        hint = "The first `whimbrel up` or `whimbrel server` makes it; on other machines copy it from there."
        return Finding(name, "warn", "none", hint)
    path = settings.home / "tokens" / kind
    if path.exists() and path.stat().st_mode & 0o077:
        return Finding(name, "fail", f"others can read {path}", f"chmod 600 {path}")
    return Finding(name, "ok", "present")


def _etcd(settings: Settings) -> Finding:
    for endpoint in settings.etcd_endpoints:
        if _answers(endpoint):
            return Finding("etcd", "ok", f"{endpoint} accepts connections")
    return Finding(
        "etcd", "warn", f"nothing listens at {settings.etcd}", "`whimbrel up` starts one; else set WHIMBREL_ETCD."
    )


def _controller(settings: Settings) -> Finding:
    url = urlsplit(settings.controller)
    port = url.port or (443 if url.scheme == "https" else 80)
    if not _answers(f"{url.hostname}:{port}"):
        hint = "Start one with `whimbrel up`, or set WHIMBREL_CONTROLLER."
        return Finding("controller", "warn", f"nothing listens at {settings.controller}", hint)
    with Client(settings.controller, settings.read_admin_token(), timeout_s=CONNECT_TIMEOUT_S) as client:
        try:
            ready = client.ready()
            checks = ready["checks"]
        except (ValueError, KeyError, TypeError):
            text = f"another program listens at {settings.controller}"
            return Finding("controller", "fail", text, "Use --port for `whimbrel up`, or end that program.")
    wrong = [f"{name}: {check['reason']}" for name, check in checks.items() if not check["ok"]]
    if wrong:
        return Finding("controller", "fail", "not ready; " + "; ".join(wrong), "Look at the controller's log.")
    return Finding("controller", "ok", f"{settings.controller} is ready")


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S):
            return True
    except (OSError, ValueError):
        return False
