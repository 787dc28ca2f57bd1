"""Pages of keys and values: 64 positions of all layers each, which texts can share.

Compiled attention reads and writes them, `kernels/attention.hpp`. A page that several leases hold
is never written: a lease that goes on within it takes a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby

import torch
from torch import Tensor

from selfspec.model.panels import PANEL

POSITIONS = 64
"""Of a page; BLOCK of the kernel."""


@dataclass(frozen=True)
class PageLayout:
    """Where a page has the keys and values of each layer."""

    dtype: torch.dtype
    heads: tuple[tuple[int, int], ...]
    """Of each layer: key heads, and numbers of one, filled up to whole vectors."""

    @cached_property
    def places(self) -> tuple[int, ...]:
        """The first number of each layer's keys, and the end of all.

        Keys are [kv heads, 64 / PANEL, width, PANEL], values behind them [kv heads, 64, width].
        """
        return tuple(
            accumulate((2 * kv * POSITIONS * width for kv, width in self.heads), initial=0)
        )

    @property
    def nbytes(self) -> int:
        """Of a page."""
        return self.places[-1] * self.dtype.itemsize

    def values(self, page: Tensor, layer: int) -> Tensor:
        """[kv heads, 64, width]; a view."""
        kv, width = self.heads[layer]
        end = self.places[layer + 1]
        return page[end - kv * POSITIONS * width : end].view(kv, POSITIONS, width)

    def slots(self, page: Tensor, slot: int) -> list[Tensor]:
        """What a page holds of one slot; views."""
        found, layer = [], 0
        for (kv, width), alike in groupby(self.heads):
            size, place = kv * POSITIONS * width, self.places[layer]
            layers = len(list(alike))
            shape = (layers, kv, width)
            keys = place + slot // PANEL * PANEL * width + slot % PANEL
            values = place + size + slot * width
            found.append(page.as_strided(shape, (2 * size, POSITIONS * width, PANEL), keys))
            found.append(page.as_strided(shape, (2 * size, POSITIONS * width, 1), values))
            layer += layers
        return found


class Page:
    """Numbers of one page, and who needs them as they are."""

    def __init__(self, numbers: Tensor) -> None:
        """[layout.places[-1]]."""
        self.numbers = numbers
        self.address = numbers.data_ptr()
        self.leases = 0
        self.kept = False
        """Whether a store keeps it for texts to come."""

    @classmethod
    def new(cls, layout: PageLayout) -> Page:
        """Zeros: what is masked weighs nothing, but nothing times NaN is NaN."""
        return cls(torch.zeros(layout.places[-1], dtype=layout.dtype))


class Pages:
    """Those of one lease, in order."""

    def __init__(self, layout: PageLayout) -> None:
        self.layout = layout
        self.held: list[Page] = []

    def room(self, start: int, end: int) -> list[Page]:
        """All pages, with room up to position `end`; those from `start` on may be written."""
        while len(self.held) * POSITIONS < end:
            self.hold(self.new())
        for index in range(start // POSITIONS, -(-end // POSITIONS)):
            page = self.held[index]
            if page.kept or page.leases > 1:
                self.held[index] = own = self.new()
                own.numbers.copy_(page.numbers)
                page.leases, own.leases = page.leases - 1, 1
        return self.held

    def hold(self, page: Page) -> None:
        """One more page."""
        page.leases += 1
        self.held.append(page)

    def new(self) -> Page:
        """A page that nobody holds."""
        return Page.new(self.layout)

    def move(self, here: int, there: int) -> None:
        """Copy what all layers hold of one position to an earlier one."""
        old, new = (self.held[slot // POSITIONS].numbers for slot in (here, there))
        torch._foreach_copy_(
            self.layout.slots(new, there % POSITIONS), self.layout.slots(old, here % POSITIONS)
        )

    def nbytes(self, lengths: Sequence[int]) -> int:
        """Of so many positions in each layer."""
        each = (2 * kv * width * self.layout.dtype.itemsize for kv, width in self.layout.heads)
        return sum(size * length for size, length in zip(each, lengths, strict=True))
