#!/usr/bin/env bash
# Install the project and its pinned packages into the given interpreter's environment.
# torch first and by exact version: on machines without a GPU that finds the CPU build where one is offered.
set -euo pipefail
python="$1"
cd "$(dirname "$0")/../.."
quiet=(--quiet --disable-pip-version-check --no-input)
torch="$(grep -E '^torch==' constraints.txt)"
echo "   torch and numpy"
"$python" -m pip install "${quiet[@]}" "$torch" "$(grep -E '^numpy==' constraints.txt)"
echo "   everything else"
"$python" -m pip install "${quiet[@]}" -c constraints.txt -e '.[dev]'
