"""Engines: the two supported databases, set up alike, and their errors as ours."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Final

from sqlalchemy import event
from sqlalchemy.engine import URL, Connection, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, InterfaceError, OperationalError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from whimbrel.errors import StorageFull, Unreachable, UsageError, WhimbrelError
from whimbrel.limits import DATABASE_BUSY_S, DATABASE_CALL_S

_RETRY_STATES: Final = frozenset({"40001", "40P01"})
"""PostgreSQL's serialization failure and deadlock: the transaction did nothing and may run again."""


class BrokenOff(Unreachable):
    """The database ended the transaction to get out of a deadlock; nothing was written."""


def parse_url(url: str | URL) -> URL:
    """The database's URL.

    Raises:
        UsageError: it is none, or names a database that is not supported.
    """
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise UsageError("The database URL cannot be parsed.", hint="Check WHIMBREL_DATABASE.") from error
    drivers = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg", "postgres": "postgresql+asyncpg"}
    driver = drivers.get(parsed.drivername.partition("+")[0])
    if driver is None:
        raise UsageError(f"The database {parsed.drivername} is not supported.", hint="Use SQLite or PostgreSQL.")
    if driver.startswith("sqlite") and (parsed.database or ":memory:") == ":memory:":
        raise UsageError("An SQLite database in memory cannot be shared by sessions.", hint="Name a file.")
    return parsed.set(drivername=driver)


def create_engine(url: URL, *, foreign_keys: bool = True) -> AsyncEngine:
    """An engine with our settings. Migrations turn foreign keys off: SQLite rebuilds tables by dropping them."""
    if url.get_backend_name() != "sqlite":
        return create_async_engine(
            url, pool_pre_ping=True, connect_args={"timeout": DATABASE_CALL_S, "command_timeout": DATABASE_BUSY_S}
        )
    engine = create_async_engine(url, connect_args={"timeout": DATABASE_BUSY_S})

    @event.listens_for(engine.sync_engine, "connect")
    def configure(connection: Any, _record: object) -> None:
        connection.isolation_level = None  # the driver begins nothing by itself; `begin` below does
        cursor = connection.cursor()
        cursor.execute("PRAGMA journal_mode = WAL")
        cursor.execute("PRAGMA synchronous = NORMAL")
        cursor.execute(f"PRAGMA foreign_keys = {'ON' if foreign_keys else 'OFF'}")
        cursor.close()

    @event.listens_for(engine.sync_engine, "begin")
    def begin(connection: Connection) -> None:
        # A deferred transaction that reads first and writes later fails when another writer came between.
        writes = connection.get_execution_options().get("write", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


@contextmanager
def translated() -> Generator[None, None, None]:
    """Turn what the drivers raise about the connection into our errors; errors of the program pass unchanged."""
    try:
        yield
    except WhimbrelError:
        raise
    except DBAPIError as error:
        reason = str(error.orig).partition("\n")[0]
        if getattr(error.orig, "sqlstate", None) in _RETRY_STATES:
            raise BrokenOff(f"The database broke the transaction off: {reason}.", hint="Try again.") from error
        if "full" in reason and "disk" in reason:
            raise StorageFull(f"The database cannot grow: {reason}.", hint="Free space on its disk.") from error
        if isinstance(error, OperationalError | InterfaceError) or error.connection_invalidated:
            raise unreachable(reason) from error
        raise
    except OSError as error:
        raise unreachable(str(error)) from error


def unreachable(reason: str) -> Unreachable:
    """The error for a database that does not answer."""
    return Unreachable(f"The database does not answer: {reason}.", hint="Check WHIMBREL_DATABASE and that it runs.")
