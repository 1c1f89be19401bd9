"""Alembic's entry: runs migrations on the connection that `orchestrator.db.schema` opened, or on the settings' database."""

from __future__ import annotations

import asyncio

from alembic import context
from sqlalchemy.engine import Connection

from orchestrator.db.engine import create_engine, parse_url
from orchestrator.db.tables import Table
from whimbrel.settings import Settings


def migrate(connection: Connection) -> None:
    """Run the migrations that were asked for in the connection's transaction."""
    context.configure(
        connection=connection,
        target_metadata=Table.metadata,
        render_as_batch=connection.dialect.name == "sqlite",  # SQLite alters a table by building it anew
        transactional_ddl=True,
    )
    with context.begin_transaction():
        context.run_migrations()


async def migrate_configured() -> None:
    """For the `alembic` command in a checkout: connect as the controller would."""
    engine = create_engine(parse_url(Settings().database_url), foreign_keys=False)
    try:
        async with engine.execution_options(write=True).begin() as connection:
            await connection.run_sync(migrate)
    finally:
        await engine.dispose()


def run() -> None:
    connection = context.config.attributes.get("connection")
    if connection is not None:
        migrate(connection)
    else:
        asyncio.run(migrate_configured())


run()
