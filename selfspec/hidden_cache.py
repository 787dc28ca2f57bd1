"""The hidden-state cache: hidden states waiting at the boundaries between segments.

Exit layers cut the decoder into segments. A position's hidden state waits at the boundary it has
reached; `advance` takes all that wait at one boundary through the next segment in one pass. This
is SpecBound's cache manager (section 2.3): *write* is leaving a row where it is, *reuse* is that a
deeper token takes its predecessors along.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from selfspec.backbone import Backbone
from selfspec.kv_cache import KVCache


class Pass(NamedTuple):
    """One batched run: `rows` hidden states through layers first+1..last."""

    rows: int
    first: int
    last: int


class HiddenCache:
    """Queues of hidden states at the boundaries 0, the exit layers, and L.

    Within a queue positions are contiguous, and the first one equals the KV length of the layers
    that the queue waits for. A pass of fewer rows than `pinned_rows`, or than the executor asks
    for, is padded; the padding's keys and values are cut off again.
    """

    def __init__(
        self,
        backbone: Backbone,
        kv: KVCache,
        exit_layers: Sequence[int] = (),
        pinned_rows: int | None = None,
    ) -> None:
        """`exit_layers` rise and lie in 0..L-1."""
        self.depths = (0, *exit_layers, backbone.num_layers)
        self.passes: list[Pass] = []
        self._backbone = backbone
        self._kv = kv
        self._rows = max(pinned_rows or 1, backbone.min_rows)
        self._queues: list[list[Tensor]] = [[] for _ in self.depths]
        self._pushed = 0

    @property
    def pushed(self) -> int:
        """Rows that entered since the last `clear`."""
        return self._pushed

    def push(self, embeddings: Tensor) -> None:
        """Queue [B, T, d] at boundary 0."""
        self._queues[0].append(embeddings)
        self._pushed += embeddings.shape[1]

    def rows(self, boundary: int) -> Tensor:
        """All rows waiting at `boundary`, [B, rows, d]. They stay there."""
        queue = self._queues[boundary]
        if len(queue) > 1:
            queue[:] = [torch.cat(queue, dim=1)]
        return queue[0]

    def advance(self, boundary: int, until: int | None = None) -> Tensor:
        """Run all rows waiting at `boundary` to boundary `until` (default the next), in one pass.

        Returns what the pass computed, [B, rows, d]; it joins the queue at `until`.
        """
        until = boundary + 1 if until is None else until
        hidden = self._run(self.rows(boundary), self.depths[boundary], self.depths[until])
        self._queues[boundary].clear()
        self._queues[until].append(hidden)
        return hidden

    def advance_all(self) -> Tensor:
        """Run every waiting row to boundary L and return them all, [B, rows, d].

        A pass goes on until it meets other rows, so no row is run apart from rows it could join:
        rows are first aligned to the deepest exit among them, then share one deep pass.
        """
        end = len(self.depths) - 1
        boundary = self._next_waiting(0)
        while boundary < end:
            until = self._next_waiting(boundary + 1)
            self.advance(boundary, until)
            boundary = until
        return self.rows(end)

    def padded(self, hidden: Tensor) -> Tensor:
        """[B, T, d] with zero rows up to the number that every pass has at least."""
        missing = self._rows - hidden.shape[1]
        return torch.nn.functional.pad(hidden, (0, 0, 0, missing)) if missing > 0 else hidden

    def clear(self) -> None:
        """Drop all waiting rows and the list of passes."""
        for queue in self._queues:
            queue.clear()
        self._pushed = 0
        self.passes = []

    def _run(self, hidden: Tensor, first: int, last: int) -> Tensor:
        if first == last:
            return hidden  # exit layer 0: no layer lies before it
        count, start = hidden.shape[1], self._kv.length(first)
        self.passes.append(Pass(count, first, last))
        block = self.padded(hidden)
        positions = torch.arange(start, start + block.shape[1], device=block.device)[None]
        output = self._backbone.run(block, first, last, positions, self._kv)
        if block.shape[1] > count:
            self._kv.truncate(start + count, first, last)
        return output[:, :count]

    def _next_waiting(self, boundary: int) -> int:
        """The first boundary from `boundary` on that has rows, at most the last one."""
        end = len(self.depths) - 1
        return next((b for b in range(boundary, end) if self._queues[b]), end)
