"""Tables fit the terminal: names stay whole, sentences are wrapped, figures give way from the right."""

from __future__ import annotations

import pytest

from api.cli.output import _fitting


@pytest.mark.parametrize(
    ("widths", "room", "shown"),
    [
        ([10, 10, 10], 34, [0, 1, 2]),
        ([10, 10, 10], 33, [0, 1]),
        ([10, 10, 10], 5, [0]),
        ([36, 20, 8, 6, 200], 80, [0, 1, 4]),
        ([36, 20, 8, 6, 200], 120, [0, 1, 2, 3, 4]),
    ],
)
def test_columns_that_have_no_room_are_left_out_from_the_right_but_never_the_sentence(
    widths: list[int], room: int, shown: list[int]
) -> None:
    assert _fitting(widths, room) == shown
