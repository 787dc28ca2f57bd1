"""A round's schedule: which rows run through which layers, in which passes. Counts, no tensors.

The hidden-state cache executes it, with hidden states in its queues; replay follows it on paper.
Source: SpecBound, section 2.3, where a row's state is written at the layer where its token exits,
and reused by the next token that goes deeper.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple


class Pass(NamedTuple):
    """One batched run: `rows` hidden states through layers first+1..last."""

    rows: int
    first: int
    last: int


class Schedule:
    """How many rows wait at each boundary: 0, the exit layers, and L; and the passes so far."""

    def __init__(self, exit_layers: Sequence[int], num_layers: int) -> None:
        """`exit_layers` rise and lie in 0..L-1."""
        self.depths = 0, *exit_layers, num_layers
        """Of the boundaries."""
        self.clear()

    def clear(self) -> None:
        """A new round: nothing waits, and nothing has run."""
        self.waiting = [0] * len(self.depths)
        self.pushed = 0
        """Rows that entered."""
        self.passes: list[Pass] = []

    def push(self, rows: int) -> None:
        """Queue rows at boundary 0."""
        self.waiting[0] += rows
        self.pushed += rows

    def advance(self, boundary: int, until: int | None = None) -> Pass | None:
        """Take all rows at `boundary` to boundary `until` (default the next) in one pass.

        None where no layer lies between them: exit layer 0 is the embedding.
        """
        until = boundary + 1 if until is None else until
        step = Pass(self.waiting[boundary], self.depths[boundary], self.depths[until])
        self.waiting[boundary] = 0
        self.waiting[until] += step.rows
        if step.first == step.last:
            return None
        self.passes.append(step)
        return step

    def finish(self) -> Iterator[tuple[int, int]]:
        """The advances (from, until) that bring every row to boundary L, to be made in this order.

        A pass goes on until it meets other rows, so no row is run apart from rows it could join:
        rows are first aligned to the deepest exit among them, then share one deep pass.
        """
        end = len(self.waiting) - 1
        return pairwise([*(b for b in range(end) if self.waiting[b]), end])
