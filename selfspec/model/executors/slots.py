"""How many key slots attention looks at, so that masked slots change no bit.

A product over S slots is added up in blocks whose borders may depend on S, and then a row of a
short pass rounds otherwise than the same row of a longer one, though all the slots between them are
masked. Where that happens is a property of the processor's kernels (MKL with AVX512: between 192
and 384 slots), so it is measured. Called by the packed executor.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import torch
from torch import Tensor

_STEP = 16
"""Slot counts are multiples of it: the softmax of torch adds up in vectors of 16."""

_FEWEST = 64
"""Slots at least: with 16 and 32 of them MKL rounds otherwise where there is AMX, in what comes
before the sums of values."""

_LONG, _AHEAD = 512, 256
"""From so many positions on it is measured so many slots ahead, below that as many as are held: the
time grows with the square of the slots, and blocks are shorter than this."""


class SteadySlots:
    """Slot counts between which a weighted sum of values has the same bits."""

    def __init__(self, kv_heads: int, head_size: int, query_rows: Sequence[int]) -> None:
        """For products of [kv_heads, rows, S] and [kv_heads, S, head_size], rows as in use."""
        self._kv_heads = kv_heads
        self._head_size = head_size
        self._query_rows = query_rows
        self._counts = [_FEWEST]
        self._measured = _FEWEST

    def at_least(self, held: int) -> int:
        """The least of the counts with room for `held` positions.

        Where none is found, blocks never agree on this machine; then it is the next multiple of
        16, and the probe of pinned mode will say so.
        """
        if held > self._counts[-1]:
            self._measure(held + (_AHEAD if held > _LONG else held))
        place = bisect.bisect_left(self._counts, held)
        return self._counts[place] if place < len(self._counts) else -(-held // _STEP) * _STEP

    def _measure(self, limit: int) -> None:
        """Find the counts up to `limit`: each agrees with the one before it."""
        limit = -(-limit // _STEP) * _STEP
        generator = torch.Generator().manual_seed(0)
        values = torch.randn(self._kv_heads, limit, self._head_size, generator=generator)
        weights = [
            torch.rand(self._kv_heads, rows, limit, generator=generator)
            for rows in self._query_rows
        ]
        for slots in range(self._measured + _STEP, limit + 1, _STEP):
            if all(_agree(entry, values, self._counts[-1], slots) for entry in weights):
                self._counts.append(slots)
            self._measured = slots


def _agree(weights: Tensor, values: Tensor, fewer: int, more: int) -> bool:
    """Whether `more` slots, of which only `fewer` have weight, give the sums of `fewer` slots."""
    padded = weights[..., :more].clone()
    padded[..., fewer:] = 0.0
    short = torch.bmm(weights[..., :fewer].contiguous(), values[:, :fewer])
    return torch.equal(short, torch.bmm(padded, values[:, :more]))
