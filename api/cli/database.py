"""`whimbrel db`: the controller's database schema."""

from __future__ import annotations

import asyncio

import typer

from api.cli.output import emit, say
from whimbrel.settings import Settings

app = typer.Typer(no_args_is_help=True)


@app.command("upgrade")
def upgrade() -> None:
    """Create the database, or bring it to this release's schema. Stop controllers first."""
    from orchestrator.db import schema  # the server's packages are absent on a node that only runs agents

    settings = Settings()
    settings.home.mkdir(parents=True, exist_ok=True)
    before = asyncio.run(schema.current(settings.database_url))
    asyncio.run(schema.upgrade(settings.database_url))
    after = asyncio.run(schema.current(settings.database_url))
    say(
        f"The database is at {after}."
        if before == after
        else f"The database went from {before or 'nothing'} to {after}."
    )


@app.command("current")
def current() -> None:
    """Print the database's schema revision."""
    from orchestrator.db import schema

    emit(asyncio.run(schema.current(Settings().database_url)) or "none")
    say(f"This release's schema is {schema.head()}.")
