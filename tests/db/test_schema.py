"""The migrated schema is the models' schema, and migrations go both ways."""

from __future__ import annotations

from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from orchestrator.db import Database, schema
from orchestrator.db.tables import Table
from whimbrel.errors import Fenced, SchemaMismatch, Unreachable, UsageError


async def test_models_equal_the_migrated_schema(database: Database):
    def differences(connection):
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        return compare_metadata(context, Table.metadata)

    async with database.engine.connect() as connection:
        assert await connection.run_sync(differences) == []


async def test_migrations_go_down_and_up_again(database_url: str):
    await schema.downgrade(database_url, "base")
    assert await schema.current(database_url) is None
    await schema.upgrade(database_url)
    assert await schema.current(database_url) == schema.head()


async def test_a_new_sqlite_file_is_made_ready(tmp_path: Path):
    database = Database(f"sqlite:///{tmp_path / 'below' / 'new.db'}")
    await database.start()
    await database.ping()
    assert await schema.current(database.url) == schema.head()
    await database.close()


async def test_another_revision_is_named_and_refused(database: Database):
    async with database.write() as session:
        await session.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(SchemaMismatch, match="9999") as caught:
        await database.start()
    assert "Another release" in caught.value.hint
    async with database.write() as session:
        await session.execute(text("UPDATE alembic_version SET version_num = '0000'"))
    with pytest.raises(SchemaMismatch, match="0000") as caught:
        await database.start()
    assert "whimbrel db upgrade" in caught.value.hint


async def test_unsupported_and_unshareable_databases_are_refused():
    for url in ("mysql://x/y", "sqlite://", "not a url"):
        with pytest.raises(UsageError):
            Database(url)


async def test_a_database_that_does_not_answer_is_unreachable():
    database = Database("postgresql://nobody@127.0.0.1:1/none")
    with pytest.raises(Unreachable):
        await database.ping()
    with pytest.raises(Unreachable):
        await database.start()
    await database.close()


async def test_an_old_leader_cannot_write(database: Database):
    await database.take_leadership(5, "first")
    await database.take_leadership(5, "first")
    async with database.write(leader=5):
        pass
    await database.take_leadership(9, "second")
    with pytest.raises(Fenced):
        async with database.write(leader=5):
            pytest.fail("an old leader got in")
    with pytest.raises(Fenced):
        await database.take_leadership(8, "late")


async def test_a_failed_transaction_leaves_nothing(database: Database):
    async def fail(session: AsyncSession) -> None:
        await session.execute(text("DELETE FROM alembic_version"))
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError):
        await database.transact(fail)
    assert await schema.current(database.url) == schema.head()
