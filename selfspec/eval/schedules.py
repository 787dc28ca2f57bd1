"""Schedules of many rounds at once: what `decoding.schedule` says of one, on arrays of counts.

Called by `totals`, which follows the rounds of every place together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from selfspec.decoding.schedule import advances_to_the_end, boundaries

Counts = npt.NDArray[np.int32]
Places = npt.NDArray[np.integer]
"""Indices of rounds, none twice."""


class Schedules:
    """How many rows wait at each boundary in each of R rounds, and the passes so far by rows."""

    def __init__(
        self, exit_layers: Sequence[int], num_layers: int, rounds: int, widest: int
    ) -> None:
        """`widest`: rows of a pass at most; in tables [R, widest] entry r - 1 stands for r rows."""
        self.depths = boundaries(exit_layers, num_layers)
        self.waiting = np.zeros((len(self.depths), rounds), np.int32)
        self.passes = np.zeros((rounds, widest), np.int32)
        """How many."""
        self.layers = np.zeros((rounds, widest), np.int32)
        """Layers that they ran."""

    def push(self, places: Places) -> None:
        """Queue a row of each of these rounds at boundary 0."""
        self.waiting[0, places] += 1

    def advance(self, places: Places, boundary: int, until: int | None = None) -> None:
        """Take all rows at `boundary` in these rounds to `until`; each round has some there."""
        until = boundary + 1 if until is None else until
        rows = self.waiting[boundary, places]
        self.waiting[boundary, places] = 0
        self.waiting[until, places] += rows
        layers = self.depths[until] - self.depths[boundary]
        if layers:
            self.passes[places, rows - 1] += 1
            self.layers[places, rows - 1] += layers

    def finish(self, places: Places) -> None:
        """Bring all rows of these rounds to boundary L."""
        for waiting, alike in self._alike(places):
            for boundary, until in advances_to_the_end(waiting):
                self.advance(alike, boundary, until)

    def _alike(self, places: Places) -> Iterator[tuple[list[bool], Places]]:
        """Groups of rounds whose rows wait at the same boundaries, and whether they do."""
        waits = self.waiting[:, places] > 0
        kinds = (1 << np.arange(len(waits))) @ waits  # a bit for each boundary
        for kind in np.unique(kinds):
            chosen = kinds == kind
            yield waits[:, chosen.argmax()].tolist(), places[chosen]
