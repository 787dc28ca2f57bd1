"""The hidden-state cache: hidden states waiting at the boundaries between segments.

Exit layers cut the decoder into segments. A position's hidden state waits at the boundary it has
reached; `advance` takes all that wait at one boundary through the next segment in one pass. This
is SpecBound's cache manager (section 2.3): *write* is leaving a row where it is, *reuse* is that a
deeper token takes its predecessors along.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from selfspec.decoding.schedule import Pass, Schedule
from selfspec.model.backbone import Backbone
from selfspec.model.kv_cache import KVCache


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
        self.schedule = Schedule(exit_layers, backbone.num_layers)
        self._backbone = backbone
        self._kv = kv
        self._rows = max(pinned_rows or 1, backbone.min_rows)
        self._queues: list[list[Tensor]] = [[] for _ in self.schedule.depths]

    def push(self, embeddings: Tensor) -> None:
        """Queue [B, T, d] at boundary 0."""
        self._queues[0].append(embeddings)
        self.schedule.push(embeddings.shape[1])

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
        step = self.schedule.advance(boundary, until)
        hidden = self.rows(boundary)
        if step is not None:
            hidden = self._run(hidden, step)
        self._queues[boundary].clear()
        self._queues[until].append(hidden)
        return hidden

    def advance_all(self) -> Tensor:
        """Run every waiting row to boundary L and return them all, [B, rows, d]."""
        for boundary, until in self.schedule.finish():
            self.advance(boundary, until)
        return self.rows(len(self._queues) - 1)

    def padded(self, hidden: Tensor) -> Tensor:
        """[B, T, d] with zero rows up to the number that every pass has at least."""
        missing = self._rows - hidden.shape[1]
        return torch.nn.functional.pad(hidden, (0, 0, 0, missing)) if missing > 0 else hidden

    def clear(self) -> None:
        """Drop all waiting rows, and begin the schedule of another round."""
        for queue in self._queues:
            queue.clear()
        self.schedule.clear()

    def _run(self, hidden: Tensor, step: Pass) -> Tensor:
        start = self._kv.length(step.first)
        block = self.padded(hidden)
        positions = torch.arange(start, start + block.shape[1], device=block.device)[None]
        output = self._backbone.run(block, step.first, step.last, positions, self._kv)
        if block.shape[1] > step.rows:
            self._kv.truncate(start + step.rows, step.first, step.last)
        return output[:, : step.rows]
