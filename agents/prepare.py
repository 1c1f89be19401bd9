"""`python -m agents.prepare SPEC_JSON HOME`: check that a run's model and environment exist; make a built-in model.

For whoever starts a run on a machine that also plays its nodes: what is wrong is said before anything is started.
Progress goes to standard output; the last two lines on standard error are the sentence and the hint, and the exit code
is the error's.
"""

from __future__ import annotations

import sys
from pathlib import Path

from agents.models import resolve_model
from agents.rollout.environments import open_environment
from whimbrel.errors import EXIT_OK, EXIT_USAGE, WhimbrelError
from whimbrel.spec import RunSpec


def prepare(spec: RunSpec, home: Path) -> None:
    """Check environment and model.

    Raises:
        WhimbrelError: one of them is not there or does not work.
    """
    environment = open_environment(spec.environment, spec.seed)
    try:
        environment.prompt(0)
    finally:
        environment.close()
    resolve_model(spec.model, home, lambda line: print(line, flush=True))  # noqa: T201


def main(arguments: list[str]) -> int:
    if len(arguments) != 2:
        print("usage: python -m agents.prepare SPEC_JSON HOME", file=sys.stderr)  # noqa: T201
        return EXIT_USAGE
    try:
        prepare(RunSpec.model_validate_json(arguments[0]), Path(arguments[1]))
    except WhimbrelError as error:
        print(f"{error.message}\n{error.hint}", file=sys.stderr)  # noqa: T201
        return error.exit_code
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
