"""How much of a prompt enters with a round: as much as the answers beside it can wait for.

Comes in: how long rounds took, with prompts and without. Goes out: rows of prompts for the next
one. Where no round was seen yet, the model's prices say. No sum depends on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from selfspec.decoding.prices import each_row, whole_round

BULK_ROWS = 1024
"""Rows of prompts at most that enter with a round."""

_NEWEST = 0.5
"""Of the newest round in a running mean: rows get dearer as a prompt gets longer."""


class Pace:
    """Learns from every round of an engine."""

    def __init__(self, row_costs: Sequence[float]) -> None:
        """`row_costs`: as `Unmeasured.rows`."""
        self._row_costs = tuple(row_costs)
        self._usual_s: dict[int, float] = {}
        """By texts: a round without prompts."""
        self._row_s: float | None = None
        """What a prompt's row adds."""
        self._newest = 0
        """Rows that entered with the newest such round."""

    def note(self, texts: int, rows: int, seconds: float) -> None:
        """A round of so many texts, with so many rows of prompts beside them."""
        if texts == 0:
            return
        if rows == 0:
            self._usual_s[texts] = _mean(self._usual_s.get(texts), seconds)
        elif self._usual_s:
            added = max(seconds - self._usual(texts), 0.0) / rows
            self._row_s = _mean(self._row_s, added)
            self._newest = rows

    def rows(self, texts: int, patience: float) -> int:
        """Of prompts: what makes a round of so many texts longer by `patience` rounds; at least 1.

        Texts of which none waits for its next token take all that fits a pass.
        """
        if texts == 0:
            return BULK_ROWS
        if self._row_s is None:
            return self._by_prices(texts, patience)
        most = min(2 * self._newest, BULK_ROWS)  # one quick round may be chance
        if self._row_s * most <= patience * self._usual(texts):
            return most
        return max(int(patience * self._usual(texts) / self._row_s), 1)

    def _usual(self, texts: int) -> float:
        """Of the nearest number of texts that was seen."""
        return self._usual_s[min(self._usual_s, key=lambda seen: abs(seen - texts))]

    def _by_prices(self, texts: int, patience: float) -> int:
        left = patience * whole_round(self._row_costs, texts)
        for count, cost in enumerate(islice(each_row(self._row_costs), texts - 1, None)):
            left -= cost
            if left < 0.0 or count == BULK_ROWS:
                return max(1, count)
        raise AssertionError  # costs go on without end


def _mean(before: float | None, newest: float) -> float:
    return newest if before is None else before + _NEWEST * (newest - before)
