"""Drafts from heads that attend: their layer reads the whole text, then drafts feed on themselves.

No layer of the model runs. Called by `choice`; the sequence keeps what the layer has read.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from selfspec.decoding.controllers import DraftController
from selfspec.decoding.drafters.base import Draft, DraftWriter, PacedDrafter
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
        """As ExitDrafter's: an unsure judge, of exit layer 0, ends the draft."""
        super().__init__(controller, end_tokens, beliefs=beliefs)
        self.heads, self._judge, self._sampler = heads, judge, sampler.for_drafts()

    def draft(self, state: DecodeState, limit: int, watch: Stopwatch) -> Steps[Draft]:
        """A path of up to min(limit, W_max) tokens; no rows wait."""
        writer = DraftWriter(self, limit, source=EXIT, sampled=self._sampler.do_sample)
        head, text, signal = self.heads.head, state.attention, self.controller.signal
        ids = state.ids
        if text is None or not writer.room:
            return writer.draft
        output = text.read(state.committed(0))
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
            output = text.draft(choice.token, output)
        return writer.draft
