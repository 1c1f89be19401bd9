from __future__ import annotations

import pytest

from agents.trainer.step import make_deterministic


@pytest.fixture(autouse=True, scope="session")
def _deterministic() -> None:
    make_deterministic()
