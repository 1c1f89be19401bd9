"""`whimbrel`: nouns and verbs, and the one place where an error becomes a sentence, a hint and an exit code."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from api.cli import agent, checkpoint, config, database, doctor, events, incident, node, run, server
from api.cli.connect import choose_server
from api.cli.drill import drill
from api.cli.output import say
from api.cli.up import up
from whimbrel import __version__
from whimbrel.errors import EXIT_INTERRUPTED, WhimbrelError

app = typer.Typer(
    name="whimbrel",
    help="Reinforcement-learning post-training that keeps going when machines, links and its own control plane fail.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None if "NO_COLOR" in os.environ else "rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(run.app, name="run", help="Start, watch and stop runs.")
app.add_typer(node.app, name="node", help="See and drain nodes.")
app.add_typer(checkpoint.app, name="checkpoint", help="See and verify committed policy versions.")
app.add_typer(incident.app, name="incident", help="See what failed, what was done and what it cost.")
app.add_typer(database.app, name="db", help="Create or upgrade the controller's database.")
app.add_typer(config.app, name="config", help="See the settings in force and where they come from.")
app.command("events")(events.events)
app.command("server")(server.server)
app.command(
    "agent",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)(agent.agent)
app.command("doctor")(doctor.doctor)
app.command("up")(up)
app.command("drill")(drill)


@app.command("version")
def version() -> None:
    """Print the version of this program."""
    print(__version__)  # noqa: T201 - data goes to standard output


@app.callback()
def options(
    server_url: Annotated[
        str, typer.Option("--server", metavar="URL", help="The controller; default WHIMBREL_CONTROLLER.")
    ] = "",
) -> None:
    """Options before the noun."""
    choose_server(server_url)


def main() -> None:
    """Run the command line; never shows a traceback for an error that Whimbrel knows."""
    try:
        app()
    except WhimbrelError as error:
        say(f"error: {error.message}")
        if error.hint:
            say(f"hint: {error.hint}")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:  # the reader of our output left, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


if __name__ == "__main__":
    main()
