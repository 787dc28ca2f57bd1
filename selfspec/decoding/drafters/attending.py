"""Drafts from heads that attend: their layer reads the whole text, then drafts feed on themselves.

Trees where the model can look at them, else chains. No layer of the model runs. Called by `choice`;
the sequence keeps what the layer has read.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from selfspec.decoding.controllers import DraftController
from selfspec.decoding.drafters.base import Draft, DraftWriter, PacedDrafter
from selfspec.decoding.drafters.heads import ROOT, Guesses, HeadGuesser, Known
from selfspec.decoding.sampling import Choice, Sampler
from selfspec.decoding.state import DecodeState
from selfspec.decoding.stats import EXIT, Stopwatch
from selfspec.decoding.work import Ask, Steps
from selfspec.heads.attending import AttendingHeads
from selfspec.heads.heads import Answer, ExitJudge, top_probability


class AttendingDrafter(PacedDrafter):
    """Chains: each draft stands beside the layer's output at the one before (EAGLE-3)."""

    def __init__(
        self,
        heads: AttendingHeads,
        judge: ExitJudge,
        sampler: Sampler,
        controller: DraftController,
        end_tokens: Collection[int] = (),
        *,
        beliefs: bool = False,
    ) -> None:
        """`judge`, of exit layer 0, ends the draft where it is unsure, as in ExitDrafter."""
        super().__init__(controller, end_tokens, beliefs=beliefs)
        self.heads, self._judge, self._sampler = heads, judge, sampler.for_drafts()

    def draft(self, state: DecodeState, limit: int, watch: Stopwatch) -> Steps[Draft]:
        """A path of up to min(limit, W_max) tokens; no rows wait."""
        writer = DraftWriter(self, limit, source=EXIT)
        head, text, signal = self.heads.head, state.attention, self.controller.signal
        ids = state.ids
        if text is None or not writer.room:
            return writer.draft
        output = yield from text.read(state.committed(0))
        while output is not None:
            writer.draft.heads += 1
            said: Answer = yield Ask(
                head=head,
                hidden=output,
                deep=None,
                temperature=self._judge.temperature(0),
                count=1,
                # the judge computes the top probability anyway
                signal=None if signal is top_probability else signal,
            )
            watch.lap("heads")
            if not self._judge.exits(said.chances[0][0], 0):
                writer.stop("unsure")
                break
            if self._sampler.is_plain_greedy and not self.beliefs:
                choice = Choice(said.tokens[0][0])
            else:
                wide = head.to_target_logits(said.logits)
                choice = self._sampler.choose(ids, wide, believe=self.beliefs)
            writer.add(choice, said.signals[0] if said.signals else said.chances[0][0])
            if not writer.room:
                break
            ids = torch.cat([ids, ids.new_tensor([[choice.token]])], dim=1)
            output = yield text.draft([choice.token], output, [len(writer.draft.tokens) - 2])
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
            parents = [(draft.parents or [])[node] for node in asked]
            before = torch.cat([self._outputs[parent] for parent in parents])
            places = [self._places[parent] for parent in parents]
            outputs = yield text.draft([draft.tokens[node] for node in asked], before, places)
            for node, output in zip(asked, outputs.split(1), strict=True):
                self._places[node] = len(self._places) - 1
                self._outputs[node] = output
        return torch.cat([self._outputs[node] for node in asked]), None
