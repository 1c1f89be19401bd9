"""Databases for tests: SQLite files, and a private PostgreSQL server where its binaries are installed."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from orchestrator.db import Database, Ledger, RunRepository, schema
from orchestrator.db.tables import Table
from tests.db.ledger_kit import Kit
from whimbrel.clock import ManualClock

_POSTGRES_BINARIES = sorted(Path("/usr/lib/postgresql").glob("*/bin"))


def run_apart(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine to its end on a loop of its own: fixtures of the session are set up while the test's loop runs."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.run, work).result()


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated, empty SQLite file."""
    path = tmp_path_factory.mktemp("template") / "template.db"
    run_apart(schema.upgrade(f"sqlite+aiosqlite:///{path}"))
    return path


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """Host and port of a private PostgreSQL server, e.g. `127.0.0.1:5433`, user `postgres`."""
    if not _POSTGRES_BINARIES:
        pytest.skip("PostgreSQL's server binaries are not installed below /usr/lib/postgresql")
    binaries, folder = _POSTGRES_BINARIES[-1], Path(tempfile.mkdtemp(prefix="whimbrel-postgres-"))
    as_user: list[str] = []
    if os.geteuid() == 0:  # initdb refuses root
        shutil.chown(folder, "postgres", "postgres")
        as_user = ["runuser", "-u", "postgres", "--"]
    data = folder / "data"
    try:
        initdb = [*as_user, str(binaries / "initdb"), "-D", str(data), "-U", "postgres", "--auth=trust", "--no-sync"]
        subprocess.run([*initdb, "--locale=C.UTF-8"], check=True, capture_output=True, cwd=folder)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        options = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={folder} -c fsync=off"
        control = [*as_user, str(binaries / "pg_ctl"), "-D", str(data), "-w", "-t", "30"]
        log = ["-l", str(folder / "log"), "-o", options]
        subprocess.run([*control, *log, "start"], check=True, stdout=subprocess.DEVNULL, cwd=folder)
        try:
            yield f"127.0.0.1:{port}"
        finally:
            subprocess.run([*control, "-m", "immediate", "stop"], check=True, stdout=subprocess.DEVNULL, cwd=folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def postgres_url(postgres: str) -> str:
    """URL of a migrated database on the private server; `empty` it before use."""
    url = f"postgresql+asyncpg://postgres@{postgres}/postgres"
    run_apart(schema.upgrade(url))
    return url


async def empty(url: str) -> None:
    """Remove all rows; much faster than a new database."""
    names = ", ".join(table.name for table in Table.metadata.sorted_tables)
    connection = await asyncpg.connect(url.replace("+asyncpg", ""))
    try:
        await connection.execute(f"TRUNCATE {names} RESTART IDENTITY CASCADE")
        await connection.execute("UPDATE alembic_version SET version_num = $1", schema.head())
    finally:
        await connection.close()


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgresql)])
async def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[str]:
    """URL of a migrated, empty database, of each kind in turn."""
    if request.param == "sqlite":
        path = tmp_path / "controller.db"
        shutil.copy(request.getfixturevalue("sqlite_template"), path)
        yield f"sqlite+aiosqlite:///{path}"
        return
    url = request.getfixturevalue("postgres_url")
    await empty(url)
    yield url


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def database(database_url: str, clock: ManualClock) -> AsyncIterator[Database]:
    """A started database, of each kind in turn."""
    database = Database(database_url, clock)
    await database.start()
    yield database
    await database.close()


@pytest.fixture
def ledger(database: Database, clock: ManualClock) -> Ledger:
    return Ledger(database, clock)


@pytest.fixture
async def kit(ledger: Ledger, database: Database, clock: ManualClock) -> Kit:
    """A run of 2 groups of 2 samples a step, staleness bound 1, at version 0."""
    return await Kit.create(ledger, RunRepository(database, clock), groups=2, size=2, staleness=1)
