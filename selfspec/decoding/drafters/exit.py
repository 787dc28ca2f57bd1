"""Drafts from exit heads: rows run through the hidden cache and wait where they left."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

from selfspec.decoding.controllers import DraftController
from selfspec.decoding.drafters.base import EXIT, Draft, DraftWriter, PacedDrafter
from selfspec.decoding.scores import Choice, Sampler
from selfspec.decoding.sequence import DecodeState
from selfspec.decoding.stats import Stopwatch
from selfspec.heads.confidence import top_probability
from selfspec.heads.exit_heads import ExitHeads
from selfspec.heads.judge import ExitJudge, read_together


class _Exit(NamedTuple):
    """One draft token and where it left."""

    layer: int
    choice: Choice
    confidence: float
    """What the controller wants to know; the judge's own where it wants nothing."""
    features: Tensor
    """The head's, [1, d]: what it believes layer L would give here."""


class ExitDrafter(PacedDrafter):
    """Drafts from exit heads on intermediate layers: SpecBound's BSCS, section 2.3.

    Each token runs segment by segment until the judge is sure; a token that is still unsure at the
    last exit layer in use (D_max) ends the draft, and so does the W_max-th draft.
    """

    def __init__(
        self,
        heads: ExitHeads,
        judge: ExitJudge,
        sampler: Sampler,
        controller: DraftController,
        end_tokens: Collection[int] = (),
        *,
        beliefs: bool = False,
    ) -> None:
        """`end_tokens` close a sequence: nothing is drafted behind one. `beliefs` are kept."""
        super().__init__(controller, end_tokens, beliefs=beliefs)
        self._heads = heads
        self._judge = judge
        self._sampler = sampler.for_drafts()

    def draft(self, state: DecodeState, limit: int, watch: Stopwatch) -> Draft:
        """Up to min(limit, W_max) tokens; the rows that gave them wait where they left."""
        writer = DraftWriter(self, limit, source=EXIT, sampled=self._sampler.do_sample)
        ids = state.ids
        deep = known_deep(self._heads, state)
        while writer.room:
            state.hidden.push(state.backbone.embed(ids[0, -1:]))
            found = self._first_exit(state, ids, deep, writer.draft, watch)
            if found is None:
                writer.stop("depth")
                break
            writer.add(found.choice, found.confidence, layer=found.layer)
            deep = found.features
            ids = torch.cat([ids, ids.new_tensor([[found.choice.token]])], dim=1)
        return writer.draft

    def _first_exit(
        self, state: DecodeState, ids: Tensor, deep: Tensor | None, draft: Draft, watch: Stopwatch
    ) -> _Exit | None:
        """The first confident layer and what it drafts; None: difficult token.

        `draft` counts the heads that are asked.

        Whether to exit is decided from the context alone, before a token is drawn: a decision that
        saw the drawn token would bias the output.
        """
        for boundary, layer in enumerate(state.hidden.schedule.depths[1:-1]):
            hidden = state.hidden.advance(boundary)[-1:]  # [1, d]: the row being drafted
            watch.lap("draft")
            head = self._heads[layer]
            draft.heads += 1
            features = head.features(hidden, deep)
            logits = head.unembed(features)
            # the one device read per judged layer
            top, (sure, confidence) = read_together(
                head.to_target_ids(logits.argmax(-1)), *self._confidences(logits, layer)
            )
            if not self._judge.exits(sure, layer):
                watch.lap("heads")
                continue
            if self._sampler.is_plain_greedy and not self.beliefs:
                choice = Choice(top)
            else:
                wide = head.to_target_logits(logits)
                choice = self._sampler.choose(ids, wide, believe=self.beliefs)
            watch.lap("heads")
            return _Exit(layer, choice, confidence, features)
        return None

    def _confidences(self, logits: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """The judge's and the controller's, [1] each, from draft logits [1, V_draft].

        Both look at the same annealed and calibrated law.
        """
        sure = self._judge.confidence(logits, layer)
        signal = self.controller.signal
        if signal is None or signal is top_probability:  # which is what the judge computes
            return sure, sure
        return sure, signal(logits / self._judge.temperature(layer))


def known_deep(heads: ExitHeads, state: DecodeState) -> Tensor | None:
    """What heads read beside the hidden state of the newest token, [1, d]; None if nothing."""
    if state.deep is None or not heads.reads_deep:
        return None
    normed: Tensor = state.backbone.unembedding.norm(state.deep)
    return normed
