"""`whimbrel config`: the settings in force."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from api.cli.output import Format, Output, print_items
from whimbrel.settings import Settings

app = typer.Typer(no_args_is_help=True)

_SECRETS = frozenset({"token", "cluster_token"})


@app.command("show")
def show(
    origins: Annotated[bool, typer.Option("--origins", help="Also say where each value comes from.")] = False,
    output: Output = Format.TABLE,
) -> None:
    """Show every setting; secrets only as present or absent."""
    settings = Settings()
    items = [_item(name, value) for name, value in settings.model_dump(mode="json").items()]
    columns = [("SETTING", lambda item: item["setting"]), ("VALUE", lambda item: item["value"])]
    if origins:
        columns.append(("ORIGIN", lambda item: item["origin"]))
    else:
        items = [{key: value for key, value in item.items() if key != "origin"} for item in items]
    print_items(items, columns, output, name="setting")


def _item(name: str, value: Any) -> dict[str, str]:
    variable = f"WHIMBREL_{name.upper()}"
    given = next((key for key in os.environ if key.upper() == variable), None)
    text = ("(set)" if value else "(from its file)") if name in _SECRETS else str(value)
    return {"setting": name, "value": text or "(derived)", "origin": given or "default"}
