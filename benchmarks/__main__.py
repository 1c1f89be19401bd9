"""`python -m benchmarks NAME [--json]`: every figure that the documents quote comes from here.

With `--json`, the last line of standard output is one JSON object; talk goes to standard error.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys

NAMES = ("recovery", "sync")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", choices=[*NAMES, "all"])
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--run-file", default="deploy/examples/quickstart.toml", help="the run to measure")
    parser.add_argument("--max-steps", type=int, default=None, help="override the run file's max_steps")
    parser.add_argument("--faults", default="all", help="recovery: comma-separated faults")
    options = parser.parse_args()
    results = {}
    for name in NAMES if options.name == "all" else (options.name,):
        results[name] = importlib.import_module(f"benchmarks.{name}").measure(options)
    answer = results if options.name == "all" else results[options.name]
    print(json.dumps(answer) if options.json else json.dumps(answer, indent=2), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
