"""What drafts cost, as shares of a step of one row: what the value rules reckon with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from selfspec.options.parts import AMOUNT, PROBABILITY, Part


@dataclass(frozen=True, kw_only=True)
class Prices(Part):
    """Shares of a step."""

    kind: ClassVar[str] = "prices"

    row: Annotated[float | tuple[float, ...] | None, PROBABILITY] = None
    """What one more row adds to a verification, in [0, 1]: the second, the third and so on, as far
    as they differ; a draft token is proposed where its chance pays for its row. None: what the
    executor says: 0.08; 0.78/0.08 where a CPU runs one row by kernels of its own; of compiled code
    with AVX2 0.15, from blocks of a quantised file 0.3; with AVX-512 0.02 to 0.08, from blocks 0.05
    and then 0.1 to 0.13, and half a step where the file is read once more, at the ninth row.
    """

    head: Annotated[float | None, AMOUNT] = None
    """What asking one exit head adds to a round, at least 0. None: what the executor says, for the
    heads of SmolLM2-135M: 0.07 to 0.09, from blocks of a quantised file 0.14 to 0.2.
    """

    @property
    def rows(self) -> tuple[float, ...] | None:
        """`row` as a tuple; the last value holds for all rows beyond."""
        return self.row if self.row is None or isinstance(self.row, tuple) else (self.row,)
