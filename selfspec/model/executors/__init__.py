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

    steady: bool = False
    """Whether a row's bits are its own, in a prompt as in a pass of one row; the probe tests it."""
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
