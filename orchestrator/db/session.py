"""The database: engine, sessions, and what makes SQLite and PostgreSQL behave alike.

Readers see a snapshot and never wait. Writers take turns: on SQLite one at a time for the whole database (a lock in
this process, BEGIN IMMEDIATE against others), on PostgreSQL by locking the rows they decide on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import TypeVar

import stamina
from sqlalchemy import text
from sqlalchemy.engine import URL
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

from orchestrator.db import schema
from orchestrator.db.engine import BrokenOff, create_engine, parse_url, translated, unreachable
from orchestrator.db.leadership import fenced, take
from whimbrel.clock import Clock, SystemClock
from whimbrel.errors import SchemaMismatch
from whimbrel.limits import DATABASE_CALL_S, DATABASE_RETRIES

Result = TypeVar("Result")


class Database:
    """One database, by its SQLAlchemy URL (`sqlite+aiosqlite:///path` or `postgresql+asyncpg://…`)."""

    def __init__(self, url: str, clock: Clock | None = None) -> None:
        self.url = parse_url(url)
        self.engine = create_engine(self.url)
        self.clock = clock or SystemClock()
        self._readers = async_sessionmaker(self.engine, expire_on_commit=False, autoflush=False)
        writing = self.engine.execution_options(write=True)
        self._writers = async_sessionmaker(writing, expire_on_commit=False, autoflush=False)
        self._turn = asyncio.Lock() if self.is_sqlite else nullcontext()

    @property
    def is_sqlite(self) -> bool:
        return self.url.get_backend_name() == "sqlite"

    async def start(self) -> None:
        """Check that the schema is this program's; a SQLite file that does not exist yet is made.

        Raises:
            SchemaMismatch: the schema is another release's, or a PostgreSQL database has none.
            Unreachable: no connection.
        """
        with translated():
            if self.is_sqlite and _is_new(self.url):
                await schema.upgrade(self.url)
            found, wanted = await schema.current(self.url), schema.head()
        if found != wanted:
            raise SchemaMismatch(
                f"The database's schema is at revision {found or 'none'}, this program needs {wanted}.",
                hint="Stop all controllers and run `whimbrel db upgrade`."
                if (found or "") < wanted  # revisions are numbered
                else "Another release of Whimbrel made it: run that one or a newer one, or set WHIMBREL_DATABASE.",
                found=found or "",
                wanted=wanted,
            )

    async def close(self) -> None:
        await self.engine.dispose()

    async def ping(self) -> None:
        """Raises Unreachable unless the database answers within DATABASE_CALL_S."""
        try:
            async with asyncio.timeout(DATABASE_CALL_S), self.read() as session:
                await session.execute(text("SELECT 1"))
        except TimeoutError as error:
            raise unreachable(f"no answer within {DATABASE_CALL_S:g} s") from error

    @asynccontextmanager
    async def read(self) -> AsyncGenerator[AsyncSession, None]:
        """A session for reading. What it returns stays readable afterwards; changes to it are not stored."""
        with translated():
            async with self._readers() as session:
                yield session

    @asynccontextmanager
    async def write(self, leader: int | None = None) -> AsyncGenerator[AsyncSession, None]:
        """A session in a transaction that commits at the end, or not at all.

        Args:
            leader: The leadership epoch under which the write is made; None for writes that are no leader's.

        Raises:
            Fenced: a newer leader has written to this database.
        """
        with translated():
            async with self._turn, self._writers.begin() as session:
                if leader is not None:
                    await fenced(session, leader)
                yield session

    async def transact(self, work: Callable[[AsyncSession], Awaitable[Result]], leader: int | None = None) -> Result:
        """Run `work` in a transaction, again from the start when the database broke it off to end a deadlock."""
        async for attempt in stamina.retry_context(
            on=BrokenOff, attempts=DATABASE_RETRIES, wait_initial=0.02, wait_max=0.5
        ):
            with attempt:
                async with self.write(leader) as session:
                    return await work(session)
        raise AssertionError("retrying ends with a result or an error")

    async def take_leadership(self, epoch: int, holder: str) -> None:
        """Record that the controller `holder` leads under `epoch`: writes under older epochs are refused from now on.

        Raises:
            Fenced: a newer epoch is recorded.
        """
        async with self.write() as session:
            await take(session, epoch, holder, self.clock.wall())


def _is_new(url: URL) -> bool:
    path = Path(url.database or "")
    path.parent.mkdir(parents=True, exist_ok=True)
    return not path.exists() or path.stat().st_size == 0
