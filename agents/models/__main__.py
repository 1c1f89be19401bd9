"""`python -m agents.models build NAME FOLDER`: make a built-in model, with a line of progress now and then."""

from __future__ import annotations

import sys
from pathlib import Path

from agents.models import build_model
from whimbrel.errors import EXIT_OK, EXIT_USAGE, WhimbrelError


def main(arguments: list[str]) -> int:
    if len(arguments) != 3 or arguments[0] != "build":
        sys.stderr.write("usage: python -m agents.models build NAME FOLDER\n")
        return EXIT_USAGE
    name, folder = arguments[1], Path(arguments[2])
    if folder.exists():
        sys.stdout.write(f"{folder} exists already\n")
        return EXIT_OK
    try:
        build_model(name, folder, _tell)
    except WhimbrelError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    _tell(f"wrote {folder}")
    return EXIT_OK


def _tell(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
