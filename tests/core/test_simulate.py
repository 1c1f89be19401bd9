"""A few seeded histories of the toy cluster in every test run; `make sim` explores more."""

from __future__ import annotations

import pytest

from tests.core.simulate import simulate


@pytest.mark.parametrize("seed", range(12))
def test_a_seeded_history_keeps_every_check(seed: int) -> None:
    assert simulate(seed, 150) == ""
