"""`python -m agents.rollout.environments check SPEC_JSON`: can this run's environment make and score a prompt?

SPEC_JSON is a run spec, or `-` to read it from standard input. Prints one JSON object; exit code 0, or 2 with the sentence
on the last line of standard error. The controller's package may not import agents, so it asks through this.
"""

from __future__ import annotations

import json
import sys

from agents.rollout.environments import open_environment
from whimbrel.errors import EXIT_OK, EXIT_USAGE, WhimbrelError
from whimbrel.spec import parse_run_spec


def main(arguments: list[str]) -> int:
    if len(arguments) != 2 or arguments[0] != "check":
        sys.stderr.write("usage: python -m agents.rollout.environments check SPEC_JSON\n")
        return EXIT_USAGE
    text = sys.stdin.read() if arguments[1] == "-" else arguments[1]
    try:
        spec = parse_run_spec(json.loads(text))
        environment = open_environment(spec.environment, spec.seed)
        try:
            prompt = environment.prompt(0)
            reward = environment.score(0, prompt.answer)
            found = {
                "environment": environment.describe(),
                "prompt": prompt.text,
                "answer": prompt.answer,
                "reward": reward,
            }
        finally:
            environment.close()
    except (WhimbrelError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_USAGE
    sys.stdout.write(json.dumps(found) + "\n")
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
