"""Write the reference pages that follow from the program: run-file keys, bounds, errors and exit codes, CLI.

`python docs/generate.py` writes them; `python docs/generate.py --check` fails when one is out of date.
"""

from __future__ import annotations

import ast
import inspect
import sys
from pathlib import Path
from typing import Any

import typer
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from api.cli.main import app
from whimbrel import errors, limits
from whimbrel.spec import RunSpec

DOCS = Path(__file__).resolve().parent


def run_files() -> str:
    lines = [
        "# Run files",
        "",
        "A run file is TOML. Unknown keys are errors. Every key, its default, and what it means:",
        "",
        "| key | default | meaning |",
        "| --- | --- | --- |",
        *_keys(RunSpec, ""),
    ]
    return "\n".join(lines) + "\n"


def _keys(model: type[BaseModel], prefix: str) -> list[str]:
    notes = attribute_notes(inspect.getsource(model))
    rows = []
    for name, field in model.model_fields.items():
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            rows += _keys(annotation, f"{prefix}{name}.")
            continue
        missing = field.default is PydanticUndefined
        default = "required" if missing and field.default_factory is None else f"`{_default(field)}`"
        rows.append(f"| `{prefix}{name}` | {default} | {notes.get(name, '')} |")
    return rows


def _default(field: Any) -> str:
    value = field.default_factory() if field.default_factory is not None else field.default
    return "none" if value is None else str(value)


def bounds() -> str:
    source = inspect.getsource(limits)
    notes = attribute_notes(source)
    lines = [
        "# Bounds",
        "",
        "Everything that Whimbrel bounds, and why.",
        "",
        "| bound | value | reason |",
        "| --- | --- | --- |",
    ]
    for name, note in notes.items():
        lines.append(f"| `{name}` | {getattr(limits, name)} | {note} |")
    return "\n".join(lines) + "\n"


def error_codes() -> str:
    lines = [
        "# Errors and exit codes",
        "",
        "The same error is a problem+json answer of the API and a sentence with an exit code in the CLI.",
        "",
        "| code | HTTP status | exit code | when |",
        "| --- | --- | --- | --- |",
    ]
    for kind in sorted(_tree(errors.WhimbrelError), key=lambda kind: kind.code):
        note = " ".join((kind.__doc__ or "").split())
        lines.append(f"| `{kind.code}` | {kind.status} | {kind.exit_code} | {note} |")
    lines += [
        "",
        "Other exit codes: 0 ok, 130 interrupted. Worker processes: 86 fenced, 87 the user's error, 143 stopped.",
    ]
    return "\n".join(lines) + "\n"


def _tree(kind: type[errors.WhimbrelError]) -> list[type[errors.WhimbrelError]]:
    return [
        kind,
        *(leaf for child in kind.__subclasses__() if child.__module__ == errors.__name__ for leaf in _tree(child)),
    ]


def cli() -> str:
    lines = ["# Command line", ""]
    command = typer.main.get_command(app)
    lines += _command_rows(command, "whimbrel")
    return "\n".join(lines) + "\n"


def _command_rows(command: Any, path: str) -> list[str]:
    if hasattr(command, "commands"):
        return [
            row for name in sorted(command.commands) for row in _command_rows(command.commands[name], f"{path} {name}")
        ]
    parts = []
    for parameter in command.params:
        if parameter.name == "help":
            continue
        name = (
            parameter.opts[0]
            if parameter.param_type_name == "option"
            else (parameter.metavar or parameter.name).upper()
        )
        parts.append(name if parameter.required else f"[{name}]")
    first = (command.help or "").strip().split("\n\n")[0].replace("\n", " ")
    return [f"- `{' '.join([path, *parts])}` — {first}"]


def attribute_notes(source: str) -> dict[str, str]:
    """The string below each assignment of a class or module, by the name that is assigned; empty where there is none."""
    tree = ast.parse(source)
    body = tree.body[0].body if len(tree.body) == 1 and isinstance(tree.body[0], ast.ClassDef) else tree.body
    notes: dict[str, str] = {}
    for statement, following in zip(body, [*body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            said = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            notes[statement.target.id] = " ".join(str(following.value.value).split()) if said else ""  # type: ignore[union-attr]
    return notes


PAGES = {"run-files.md": run_files, "bounds.md": bounds, "errors.md": error_codes, "cli.md": cli}


def main() -> int:
    stale = []
    for name, page in PAGES.items():
        text = page()
        path = DOCS / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(name)
            if "--check" not in sys.argv:
                path.write_text(text, encoding="utf-8")
    if "--check" in sys.argv and stale:
        print(f"out of date: {', '.join(stale)}; run python docs/generate.py", file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
