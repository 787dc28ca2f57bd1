"""How much of a prompt enters with a round."""

from __future__ import annotations

import pytest

from selfspec.decoding.engine import BULK_ROWS, Pace


def test_prices_say_until_rounds_were_seen() -> None:
    pace = Pace((0.1,))
    assert pace.rows(1, 1.02) == 10
    assert pace.rows(11, 1.02) == 20  # a round of eleven texts takes twice as long
    assert pace.rows(1, 0.0) == 1
    assert pace.rows(0, 0.0) == BULK_ROWS


@pytest.mark.parametrize("row_s", [0.02, 0.5, 3.0])
def test_rounds_get_as_long_as_asked_whatever_the_prices_said(row_s: float) -> None:
    pace = Pace((0.1,))
    usual, patience = 2.0, 1.5
    for _ in range(3):
        pace.note(8, 0, usual)
    for _ in range(12):
        rows = pace.rows(8, patience)
        pace.note(8, rows, usual + rows * row_s)
    assert rows == pytest.approx(max(patience * usual / row_s, 1), abs=1)
    assert pace.rows(9, patience) == rows  # the nearest number of texts that was seen


def test_a_quick_round_doubles_the_rows_at_most() -> None:
    pace = Pace((0.1,))
    pace.note(1, 0, 1.0)
    pace.note(1, 5, 1.0)
    assert pace.rows(1, 1.0) == 10
    for _ in range(20):
        pace.note(1, pace.rows(1, 1.0), 1.0)
    assert pace.rows(1, 1.0) == BULK_ROWS


def test_rounds_of_prompts_alone_say_nothing_of_waiting() -> None:
    pace = Pace((0.1,))
    pace.note(0, 100, 9.0)
    pace.note(3, 100, 9.0)  # and none without prompts was seen
    assert pace.rows(1, 1.05) == 10
