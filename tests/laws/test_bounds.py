"""Law 7: every bound has its name and its reason in `whimbrel/limits.py`, and there is none that nothing keeps to."""

from __future__ import annotations

import ast
import inspect
import re
from functools import cache
from pathlib import Path

import pytest

from whimbrel import limits

ROOT = Path(__file__).resolve().parents[2]
BODY = ast.parse(inspect.getsource(limits)).body
UNITS = frozenset({"KIB", "MIB"})


def _bounds() -> dict[str, str]:
    """Reason by name of each bound."""
    found: dict[str, str] = {}
    for statement, after in zip(BODY, [*BODY[1:], ast.Pass()], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            said = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            found[statement.target.id] = str(said)
    return {name: reason for name, reason in found.items() if name not in UNITS}


@cache
def _program() -> dict[Path, str]:
    paths = (path for part in ("whimbrel", "orchestrator", "agents", "api") for path in (ROOT / part).rglob("*.py"))
    return {path: path.read_text(encoding="utf-8") for path in paths if path.name != "limits.py"}


@pytest.mark.parametrize("name", _bounds())
def test_law_7_a_bound_has_a_reason_and_is_kept_to(name: str) -> None:
    assert len(_bounds()[name].split()) >= 4, f"{name} has no reason"
    assert any(re.search(rf"\b{name}\b", text) for text in _program().values()), f"nothing keeps to {name}"


def test_law_7_no_bound_is_made_anywhere_else() -> None:
    """By their names: constants that end in a unit or an extent. The pacing of one command at a terminal stays with it."""
    units = "S|BYTES|CHARS|MAX|KEPT|QUEUED|HELD|RETRIES|ATTEMPTS|TOKENS"
    made = re.compile(rf"^_?[A-Z][A-Z0-9_]*_({units})\b[^=\n]*= *[\d(]", re.MULTILINE)
    elsewhere = {
        f"{path.relative_to(ROOT)}: {found.group(0)}"
        for path, text in _program().items()
        if path.parent.name != "cli"
        for found in made.finditer(text)
    }
    assert not elsewhere
