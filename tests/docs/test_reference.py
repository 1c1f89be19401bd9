"""The reference pages say what the program does now."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_generated_pages_are_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, "docs/generate.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_every_test_named_in_the_architecture_exists() -> None:
    import re

    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", (ROOT / "ARCHITECTURE.md").read_text())
    assert named, "the table of laws names its tests"
    for path, function in named:
        text = (ROOT / path).read_text()
        assert not function or f"def {function}(" in text, f"{path} has no {function}"
