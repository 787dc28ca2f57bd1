"""How layers a..b are run. The backbone chooses one executor for a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from selfspec.model.kv_pages import PageLayout
from selfspec.model.rows import Rows


@dataclass(frozen=True)
class Claims:
    """What an executor says of itself. The backbone never gives it a pass that it cannot run."""

    steady_from: int | None = None
    """From this many rows on a row's bits do not depend on how many others run with it, so shorter
    passes are padded; the probe tests it. None: not claimed."""
    steady_to: int | None = None
    """Up to this many rows. None: any number, so that a row has the same bits in a prompt."""
    trees: bool = False
    """Runs rows that have siblings."""
    row_costs: tuple[float, ...] = (0.08,)
    """What a pass's second row adds, its third and so on, as shares of a pass of one, where nobody
    measured it; the last value holds for all beyond."""
    head_cost: float = 0.08
    """What asking an exit head takes, likewise."""
    spans: int = 1
    """Sequences of one pass at most; the backbone splits what has more."""
    pages: PageLayout | None = None
    """Of keys and values, where texts can share them."""

    @property
    def least_rows(self) -> int:
        """Rows of a pass at least."""
        return self.steady_from or 1


class Executor(Protocol):
    """Runs a range of decoder layers on a block of rows, and the way from there to logits."""

    claims: Claims

    @property
    def weight_bytes(self) -> int:
        """Of the weights that a row reads, as they are kept: all layers' and the unembedding's."""

    def run(self, hidden: Tensor, first: int, last: int, rows: Rows) -> Tensor:
        """Layers first+1..last on [T, d]; adds keys and values of T positions to the leases."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Output of layer L, [T, d] -> final norm and lm_head, [T, V]."""
