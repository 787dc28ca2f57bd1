"""Rows as data: which positions of which sequences a pass runs.

A pass is a flat block of rows [T, d]; what they belong to stands beside it. One sequence with a
chain of drafts is the smallest case. Made by the hidden cache, read by executors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec.model.kv_store import Lease


@dataclass(frozen=True)
class Span:
    """Rows of one sequence, side by side in the block."""

    lease: Lease
    count: int
    parents: tuple[int, ...] | None = None
    """None: each row follows the one before. Else, for each row, the earlier row of the span that
    it follows; -1: the newest position that the lease holds, -2: the one before it, and so on."""


@dataclass(frozen=True)
class Rows:
    """The rows of one pass."""

    positions: Tensor
    """[T] int64"""
    spans: tuple[Span, ...]
    """In the order of the block."""

    @classmethod
    def of(
        cls,
        lease: Lease,
        start: int,
        count: int,
        device: torch.device,
        parents: Sequence[int] | None = None,
    ) -> Rows:
        """`count` rows of one sequence behind its first `start` positions: a chain, or a tree."""
        span = Span(lease, count, None if parents is None else tuple(parents))
        if span.parents is None:
            return cls(torch.arange(start, start + count, device=device), (span,))
        return cls(torch.tensor(depths(span.parents), device=device) + start, (span,))

    @classmethod
    def joined(cls, parts: Sequence[Rows]) -> Rows:
        """One pass of what would be several, each of other sequences."""
        positions = torch.cat([part.positions for part in parts])
        return cls(positions, tuple(span for part in parts for span in part.spans))

    @property
    def only(self) -> Span:
        """The span of a pass that has one."""
        (span,) = self.spans
        return span

    @property
    def are_chains(self) -> bool:
        """Whether no row has a sibling."""
        return all(span.parents is None for span in self.spans)

    def each(self, hidden: Tensor) -> Iterator[tuple[Tensor, Rows]]:
        """The block [T, d] and its rows, span by span."""
        counts = [span.count for span in self.spans]
        parts = zip(hidden.split(counts), self.positions.split(counts), self.spans, strict=True)
        for part, positions, span in parts:
            yield part, Rows(positions, (span,))


def depths(parents: Sequence[int]) -> list[int]:
    """How far behind the newest held position each row of a tree is: 0 is the next one."""
    found: list[int] = []
    for parent in parents:
        found.append((found[parent] if parent >= 0 else parent) + 1)
    return found


def held_behind(parents: Sequence[int]) -> list[int]:
    """How many of the newest held positions each row of a tree does not see."""
    found: list[int] = []
    for parent in parents:
        found.append(found[parent] if parent >= 0 else -1 - parent)
    return found


def ancestors(parents: Sequence[int], device: torch.device) -> Tensor:
    """[T, T], true where the column's row is the row itself or one that it follows."""
    found = torch.eye(len(parents), dtype=torch.bool)
    for row, parent in enumerate(parents):
        if parent >= 0:
            found[row] |= found[parent]
    return found.to(device)
