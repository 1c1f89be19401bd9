"""Read a run file; turn what is wrong with it into one sentence with a suggestion."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel, ValidationError

from whimbrel.errors import SpecError
from whimbrel.spec.run import RunSpec


def load_run_file(path: Path) -> RunSpec:
    """Read and validate a TOML run file.

    A relative `model` that names a folder beside the run file is made absolute, and so is the file of an
    `environment.entry` of the form `file.py:function`.

    Raises:
        SpecError: the file cannot be read, is no TOML, or does not validate.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise SpecError(f"The run file {path} cannot be read: {error.strerror}.", hint="Check the path.") from error
    except UnicodeDecodeError as error:
        raise SpecError(f"The run file {path} is not UTF-8 text.", hint="Save it as UTF-8.") from error
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"The run file {path} is not valid TOML: {error}.", hint="Correct that line.") from error
    model = document.get("model")
    if isinstance(model, str) and not model.startswith("builtin:") and not Path(model).is_absolute():
        beside = (path.parent / model).resolve()
        if beside.is_dir():
            document["model"] = str(beside)
    environment: object = document.get("environment")
    if isinstance(environment, dict):
        _place_entry(cast("dict[str, object]", environment), path.parent)
    return parse_run_spec(document, source=str(path))


def _place_entry(environment: dict[str, object], folder: Path) -> None:
    """Make an environment's file, which is named as seen from the run file's folder, absolute."""
    entry = environment.get("entry")
    if isinstance(entry, str):
        file, colon, function = entry.rpartition(":")
        if file.endswith(".py") and (folder / file).is_file():
            environment["entry"] = f"{(folder / file).resolve()}{colon}{function}"


def parse_run_spec(document: Mapping[str, Any], *, source: str = "the run spec") -> RunSpec:
    """Validate a run spec given as a mapping.

    Raises:
        SpecError: names the first wrong key, what it holds, and for an unknown key the nearest known one.
    """
    try:
        return RunSpec.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        others = error.error_count() - 1
        more = f" ({others} more after this one.)" if others else ""
        if first["type"] == "extra_forbidden":
            raise SpecError(
                f"Unknown key {where} in {source}.{more}", hint=_suggestion(first["loc"]), key=where
            ) from error
        raise SpecError(
            f"{f'{where} in {source}' if where else source} is wrong: {_sentence(first['msg'])}{more}",
            hint="Correct the value; docs/run-files.md lists all keys.",
            key=where,
        ) from error


def _sentence(message: str) -> str:
    message = message.removeprefix("Value error, ")
    return message if message.endswith(".") else message + "."


def _suggestion(location: tuple[int | str, ...]) -> str:
    known = list(_keys_at(RunSpec, location[:-1]))
    near = difflib.get_close_matches(str(location[-1]), known, n=1, cutoff=0.5)
    if near:
        return f"Did you mean {'.'.join([*map(str, location[:-1]), near[0]])}?"
    return f"Known keys here: {', '.join(known)}."


def _keys_at(model: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    for part in path:
        field = model.model_fields.get(str(part))
        if field is None or not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)):
            return []
        model = field.annotation
    return list(model.model_fields)
