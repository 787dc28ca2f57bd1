"""Drafts from heads that attend: their layer reads the whole text, then drafts feed on themselves.

Trees where the model can look at them, else chains. No layer of the model runs. Called by `choice`;
the sequence keeps what the layer has read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from selfspec.decoding.drafters.base import Draft, DraftWriter
from selfspec.decoding.drafters.heads import ROOT, ExitDrafter, Guesses, HeadGuesser, Known
from selfspec.decoding.state import DecodeState
from selfspec.decoding.stats import EXIT, Stopwatch
from selfspec.decoding.work import Steps
from selfspec.heads.attending import AttendingHeads
from selfspec.heads.heads import Answer


class AttendingDrafter(ExitDrafter):
    """Chains: each draft stands beside the layer's output at the one before (EAGLE-3).

    The judge, of exit layer 0, ends a draft where it is unsure.
    """

    heads: AttendingHeads

    def draft(self, state: DecodeState, limit: int, watch: Stopwatch) -> Steps[Draft]:
        """A path of up to min(limit, W_max) tokens; no rows wait."""
        writer = DraftWriter(self, limit, source=EXIT)
        head, text, ids = self.heads.head, state.attention, state.ids
        if text is None or not writer.room:
            return writer.draft
        output = yield from text.read(state.committed(0))
        while output is not None:
            writer.draft.heads += 1
            said: Answer = yield self._question(head, 0, output, None)
            watch.lap("heads")
            found = self._exit(head, said, 0, ids)
            if found is None:
                writer.stop("unsure")
                break
            writer.add(found.choice, found.confidence)
            if not writer.room:
                break
            token = found.choice.token
            ids = torch.cat([ids, ids.new_tensor([[token]])], dim=1)
            output = yield text.draft([token], output, [len(writer.draft.proposed) - 2])
        return writer.draft


class AttendingGuesser(HeadGuesser):
    """Trees (EAGLE-2, Li et al. 2024): the layer runs once for each level.

    Every token's row stands beside the layer's output at its parent, and attends to the text and to
    the tokens down to it.
    """

    def begin(self, state: DecodeState) -> None:
        """A round begins."""
        super().begin(state)
        self._places = {ROOT: -1}
        """By token: its number among those that the layer has read this round."""
        self._outputs: dict[int, Tensor] = {}

    def ask(self, draft: Draft, asked: Sequence[int], watch: Stopwatch) -> Steps[list[Guesses]]:
        """Nothing, where the layer has read nothing yet; what was verified since is read first."""
        text = self._state.attention
        if not self._outputs and text is not None:
            root = yield from text.read(self._state.committed(0))
            self._outputs = {} if root is None else {ROOT: root}
        if not self._outputs:
            return [Known([], []) for _ in asked]
        return (yield from super().ask(draft, asked, watch))

    def _rows(self, draft: Draft, asked: Sequence[int]) -> Steps[tuple[Tensor, Tensor | None]]:
        text = self._state.attention
        if text is not None and asked[0] != ROOT:
            rows = [draft.proposed[node] for node in asked]
            before = torch.cat([self._outputs[row.parent] for row in rows])
            places = [self._places[row.parent] for row in rows]
            outputs = yield text.draft([row.token for row in rows], before, places)
            for node, output in zip(asked, outputs.split(1), strict=True):
                self._places[node] = len(self._places) - 1
                self._outputs[node] = output
        return torch.cat([self._outputs[node] for node in asked]), None
