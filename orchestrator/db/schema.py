"""The schema's revision: read it, move it. The migrations themselves are in `migrations/versions`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import text
from sqlalchemy.engine import URL, Connection

from orchestrator.db.engine import create_engine, parse_url

MIGRATIONS: Final = Path(__file__).resolve().parents[2] / "migrations"
_LOCK: Final = 0x77_68_69_6D
"""PostgreSQL's advisory lock under which one controller at a time migrates."""

Result = TypeVar("Result")


def head() -> str:
    """The revision that this program needs."""
    revision = ScriptDirectory.from_config(config()).get_current_head()
    assert revision is not None, "the migrations end in one revision"
    return revision


async def current(url: str | URL) -> str | None:
    """The revision of the database, or None when it has no schema."""
    return await _connected(url, lambda connection: MigrationContext.configure(connection).get_current_revision())


async def upgrade(url: str | URL, revision: str = "head") -> None:
    """Bring the database to `revision` in one transaction: all of it, or nothing."""
    await _connected(url, lambda connection: command.upgrade(config(connection), revision))


async def downgrade(url: str | URL, revision: str) -> None:
    """Take the database back to `revision` (`base`: no tables) in one transaction. What newer columns held is lost."""
    await _connected(url, lambda connection: command.downgrade(config(connection), revision))


def config(connection: Connection | None = None) -> Config:
    """Alembic's configuration; with a connection, migrations run in its transaction."""
    settings = Config()
    settings.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    settings.attributes["connection"] = connection
    return settings


async def _connected(url: str | URL, work: Callable[[Connection], Result]) -> Result:
    engine = create_engine(parse_url(url), foreign_keys=False)
    try:
        async with engine.execution_options(write=True).begin() as connection:
            if connection.dialect.name == "postgresql":
                await connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
            return await connection.run_sync(work)
    finally:
        await engine.dispose()
