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

from selfspec.decoding.acceptance import Target
from selfspec.decoding.schedule import Pass, Schedule
from selfspec.decoding.work import Run, Steps, Unembed
from selfspec.errors import InvalidDraft
from selfspec.model.backbone import Backbone
from selfspec.model.kv_store import Lease


class HiddenCache:
    """Queues of hidden states at the boundaries 0, the exit layers, and L.

    Within a queue positions are contiguous, and the first one equals the KV length of the layers
    that the queue waits for. A pass of fewer rows than `pinned_rows` is padded.
    """

    def __init__(
        self,
        backbone: Backbone,
        lease: Lease,
        exit_layers: Sequence[int] = (),
        pinned_rows: int | None = None,
        state_layers: Sequence[int] = (),
    ) -> None:
        """`exit_layers` rise and lie in 0..L-1.

        `state_layers`, 0..L: rows that run to the end leave their states there, for who reads them;
        then no row waits at an exit layer.
        """
        between = sorted(layer for layer in state_layers if 0 < layer < backbone.num_layers)
        self.schedule = Schedule(between if state_layers else exit_layers, backbone.num_layers)
        self._state_layers = state_layers
        self.states: Tensor | None = None
        """Of the rows that ran to the end last, side by side, [rows, layers * d]."""
        self._backbone = backbone
        self._lease = lease
        self.least = pinned_rows or 1
        """Rows that every pass has at least."""
        self._queues: list[list[Tensor]] = [[] for _ in self.schedule.depths]
        self._parents: list[int] = []
        """Of each row of the round, as they entered; -1: the committed text."""

    def push(self, embeddings: Tensor, parents: Sequence[int] | None = None) -> None:
        """Queue [T, d] at boundary 0: each row follows the one before, or its parent.

        `parents`: earlier rows of the round, -1 for the committed text. What has run already must
        be a chain: raises InvalidDraft for a row behind one of its siblings.
        """
        count = len(self._parents)
        chain = range(count - 1, count - 1 + len(embeddings))
        if count and not self._is_chain:
            raise InvalidDraft("rows cannot be queued behind a tree: queue them with it")
        self._parents += chain if parents is None else parents
        self._queues[0].append(embeddings)
        self.schedule.push(len(embeddings))

    def rows(self, boundary: int) -> Tensor:
        """All rows waiting at `boundary`, [rows, d]. They stay there."""
        queue = self._queues[boundary]
        if len(queue) > 1:
            queue[:] = [torch.cat(queue)]
        return queue[0]

    def advance(self, boundary: int, until: int | None = None) -> Steps[Tensor]:
        """Run all rows waiting at `boundary` to boundary `until` (default the next), in one pass.

        Gives what the pass computed, [rows, d]; it joins the queue at `until`.
        """
        until = boundary + 1 if until is None else until
        step = self.schedule.advance(boundary, until)
        hidden = self.rows(boundary)
        if step is not None:
            hidden = yield self._run(hidden, step)
        self._queues[boundary].clear()
        self._queues[until].append(hidden)
        return hidden

    def advance_all(self) -> Steps[Tensor]:
        """Run every waiting row to boundary L; gives them all, [rows, d]."""
        if not self._state_layers:
            for boundary, until in self.schedule.finish():
                yield from self.advance(boundary, until)
            return self.rows(len(self._queues) - 1)
        hidden, passed = self.rows(0), {}
        for boundary, depth in enumerate(self.schedule.depths[:-1]):
            passed[depth] = hidden
            hidden = yield from self.advance(boundary)
        passed[self.schedule.depths[-1]] = hidden
        self.states = torch.cat([passed[layer] for layer in self._state_layers], dim=-1)
        return hidden

    def unembed(self, hidden: Tensor) -> Steps[Target]:
        """The target's logits of rows at boundary L, [T, d]."""
        target: Target = yield Unembed(backbone=self._backbone, hidden=hidden, least=self.least)
        return target

    def clear(self) -> None:
        """Drop all waiting rows, and begin the schedule of another round."""
        for queue in self._queues:
            queue.clear()
        self._parents, self.states = [], None
        self.schedule.clear()

    @property
    def _is_chain(self) -> bool:
        return self._parents == list(range(-1, len(self._parents) - 1))

    def _run(self, hidden: Tensor, step: Pass) -> Run:
        return Run(
            backbone=self._backbone,
            lease=self._lease,
            hidden=hidden,
            first=step.first,
            last=step.last,
            parents=self._tree(step),
            least=self.least,
        )

    def _tree(self, step: Pass) -> list[int] | None:
        """Parents of a pass's rows; None for a chain."""
        if self._is_chain:
            return None
        # no row of the round is through all layers before its last pass
        held = self._lease.length(step.first) - self._lease.length(self._backbone.num_layers - 1)
        parents = [parent - held for parent in self._parents[held : held + step.rows]]
        return None if parents == list(range(-1, step.rows - 1)) else parents
