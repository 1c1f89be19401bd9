"""The child process that holds the user's environment: read a request, call the user's code, answer.

The protocol has its own two pipes, so that user code may print as it likes.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import struct
import sys
import traceback
from pathlib import Path
from typing import Any

import msgspec

LENGTH = struct.Struct("!I")


def main() -> None:
    requests, replies = int(sys.argv[1]), int(sys.argv[2])
    environment: Any = None
    while (request := _read_request(requests)) is not None:
        verb, *arguments = request
        try:
            if verb == "load":
                environment = load(*arguments)
                value = None
            else:
                value = getattr(environment, verb)(*arguments)
            reply = msgspec.msgpack.encode({"value": value}, enc_hook=_as_number)
        except Exception as error:
            traceback.print_exc()
            reply = msgspec.msgpack.encode({"error": _describe(error)})
        _write(replies, LENGTH.pack(len(reply)) + reply)


def load(entry: str, params: dict[str, Any], seed: int) -> Any:
    """Import `module:function` or `/path/file.py:function` and call it with the run's parameters (and `seed` if it takes one)."""
    where, _, function = entry.rpartition(":")
    module = _load_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    factory = getattr(module, function)
    names = inspect.signature(factory).parameters
    environment = factory(**params, **({"seed": seed} if "seed" in names and "seed" not in params else {}))
    for verb in ("prompt", "reward"):
        if not callable(getattr(environment, verb, None)):
            raise TypeError(f"{function}() returned {type(environment).__name__}, which has no method {verb}()")
    return environment


def _load_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ImportError(f"there is no Python file {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    return module


def _as_number(value: Any) -> float:
    """NumPy and torch scalars as rewards."""
    return float(value)


def _describe(error: Exception) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(place.filename).name}, line {place.lineno})"


def _read_request(pipe: int) -> list[Any] | None:
    header = _read(pipe, LENGTH.size)
    if header is None:
        return None
    body = _read(pipe, LENGTH.unpack(header)[0])
    return None if body is None else msgspec.msgpack.decode(body)


def _read(pipe: int, length: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < length:
        part = os.read(pipe, length - len(parts))
        if not part:
            return None
        parts += part
    return bytes(parts)


def _write(pipe: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(pipe, view) :]


if __name__ == "__main__":
    main()
