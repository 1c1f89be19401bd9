"""From a run's `model` to a folder on this machine."""

from __future__ import annotations

import difflib
import fcntl
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from agents.models import arithmetic
from whimbrel.errors import TimedOut, UsageError
from whimbrel.limits import BUILD_WAIT_S

BUILTIN: Final = "builtin:"
BUILDERS: Final[dict[str, Callable[[Path, Callable[[str], None]], None]]] = {"arithmetic": arithmetic.build}


def resolve_model(model: str, home: Path, tell: Callable[[str], None] = lambda _line: None) -> Path:
    """The folder of a run's model; a built-in one is made once under `home/models/NAME` by whoever comes first.

    Raises:
        UsageError: no such built-in model, or the path is no model folder.
        TimedOut: another process holds the build for longer than BUILD_WAIT_S.
    """
    if model.startswith(BUILTIN):
        return _builtin(model.removeprefix(BUILTIN), home, tell)
    folder = Path(model).expanduser()
    if not folder.is_dir():
        raise UsageError(
            f"The model {model} is no folder on this machine.",
            hint=f"Give a Hugging Face model folder that every node has, or {_known()}.",
        )
    missing = [name for name in ("config.json",) if not (folder / name).is_file()]
    if not any(folder.glob("*.safetensors")):
        missing.append("*.safetensors")
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")):
        missing.append("tokenizer.json")
    if missing:
        raise UsageError(
            f"The folder {folder} is no model: it has no {', no '.join(missing)}.",
            hint="It needs what save_pretrained() of the model and of its tokenizer write.",
        )
    return folder.resolve()


def build_model(name: str, folder: Path, tell: Callable[[str], None]) -> None:
    """Make a built-in model in `folder`, which appears only when it is complete.

    Raises:
        UsageError: no such built-in model.
    """
    if name not in BUILDERS:
        near = difflib.get_close_matches(name, BUILDERS, n=1, cutoff=0.5)
        hint = f"Did you mean {BUILTIN}{near[0]}?" if near else f"There is {_known()}."
        raise UsageError(f"There is no built-in model named {name}.", hint=hint)
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = folder.with_name(f".{folder.name}.{os.getpid()}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    try:
        BUILDERS[name](draft, tell)
        draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _builtin(name: str, home: Path, tell: Callable[[str], None]) -> Path:
    folder = home.resolve() / "models" / name
    if folder.is_dir():
        return folder
    if name not in BUILDERS:
        build_model(name, folder, tell)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{name}.lock").open("w") as lock:
        _wait_for(lock.fileno(), name)
        for left in folder.parent.glob(f".{name}.*.draft"):  # of a build that was killed: nobody else builds now
            shutil.rmtree(left, ignore_errors=True)
        if not folder.is_dir():
            build_model(name, folder, tell)
    return folder


def _wait_for(lock: int, name: str) -> None:
    deadline = time.monotonic() + BUILD_WAIT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                raise TimedOut(
                    f"Another process has been building {BUILTIN}{name} for more than {BUILD_WAIT_S:g} s.",
                    hint="Is it stopped? End it and start the run again.",
                ) from error
            time.sleep(0.2)
        else:
            return


def _known() -> str:
    return " or ".join(f"{BUILTIN}{name}" for name in BUILDERS)
