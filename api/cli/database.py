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
    before, after = asyncio.run(_upgrade(_database_url()))
    say(
        f"The database is at {after}."
        if before == after
        else f"The database went from {before or 'nothing'} to {after}."
    )


@app.command("current")
def current() -> None:
    """Print the database's schema revision."""
    found, wanted = asyncio.run(_current(_database_url()))
    emit(found or "none")
    say(f"This release's schema is {wanted}.")


def _database_url() -> str:
    settings = Settings()
    settings.home.mkdir(parents=True, exist_ok=True)
    return settings.database_url


async def _upgrade(url: str) -> tuple[str | None, str | None]:
    """The revisions before and after."""
    from orchestrator.db import schema  # the server's packages are absent on a node that only runs agents
    from orchestrator.db.engine import translated

    with translated():
        before = await schema.current(url)
        await schema.upgrade(url)
        return before, await schema.current(url)


async def _current(url: str) -> tuple[str | None, str]:
    """The database's revision, and the one that this release needs."""
    from orchestrator.db import schema
    from orchestrator.db.engine import translated

    with translated():
        return await schema.current(url), schema.head()
