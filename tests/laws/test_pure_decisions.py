"""Law 6: decisions are pure. What the core's modules may touch is listed here; everything else is a broken law."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from orchestrator import core

MODULES = sorted(Path(core.__file__).parent.glob("*.py"))
MAY_IMPORT = (
    "re",
    "__future__",
    "collections",
    "dataclasses",
    "typing",
    "orchestrator.core",
    "whimbrel.errors",
    "whimbrel.limits",
)
ACTS = frozenset({"open", "print", "input", "eval", "exec", "__import__", "globals", "id", "hash"})


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_law_6_the_core_imports_and_calls_nothing_that_acts(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        imported = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            imported = [node.module or ""]
        for name in imported:
            assert any(name == one or name.startswith(f"{one}.") for one in MAY_IMPORT), f"{path.name} imports {name}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ACTS, f"{path.name} calls {node.func.id} in line {node.lineno}"
        assert not isinstance(node, ast.Global | ast.Nonlocal | ast.Await), f"{path.name} keeps or awaits something"
