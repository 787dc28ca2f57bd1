"""Drafts from exit heads: rows run through the hidden cache and wait where they left."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

from selfspec.decoding.controllers import DraftController
from selfspec.decoding.drafters.base import EXIT, Draft, DraftWriter, PacedDrafter
from selfspec.decoding.drafters.guesses import Known, known_deep, processed, read
from selfspec.decoding.drafters.tree import ROOT, Guesses, Offer, Tree
from selfspec.decoding.prices import DraftCost
from selfspec.decoding.scores import Choice, Sampler
from selfspec.decoding.sequence import DecodeState
from selfspec.decoding.stats import Stopwatch
from selfspec.heads.confidence import top_probability
from selfspec.heads.exit_heads import ExitHeads
from selfspec.heads.judge import ExitJudge, read_together
from selfspec.heads.types import ExitHead


class Siblings(NamedTuple):
    """Second guesses beside each token of a chain: rows that only verification runs."""

    guesses: int
    """For a place, the chain's included."""
    cost: DraftCost
    most: int
    """Draft tokens of a round."""


class _Exit(NamedTuple):
    """One draft token and where it left."""

    layer: int
    choice: Choice
    confidence: float
    """What the controller wants to know; the judge's own where it wants nothing."""
    features: Tensor
    """The head's, [1, d]: what it believes layer L would give here."""
    guesses: Guesses | None = None
    """The token's own, and what else may stand there; None: nobody wants to know."""


class ExitDrafter(PacedDrafter):
    """Drafts from exit heads on intermediate layers: SpecBound's BSCS, section 2.3.

    Each token runs segment by segment until the judge is sure; a token that is still unsure at the
    last exit layer in use (D_max) ends the draft, and so does the W_max-th draft. Second guesses of
    the layers where tokens left may join as siblings: no layer runs for these before verification.
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
        siblings: Siblings | None = None,
    ) -> None:
        """`end_tokens` close a sequence: nothing is drafted behind one. `beliefs` are kept.

        With `siblings` the acceptance must be lossless, and the executor run trees.
        """
        super().__init__(controller, end_tokens, beliefs=beliefs)
        self._heads = heads
        self._judge = judge
        self._sampler = sampler.for_drafts()
        self._siblings = siblings

    def draft(self, state: DecodeState, limit: int, watch: Stopwatch) -> Draft:
        """A path of up to min(limit, W_max) tokens; the rows that gave it wait where they left."""
        writer = DraftWriter(self, limit, source=EXIT, sampled=self._sampler.do_sample)
        ids = state.ids
        deep = known_deep(self._heads, state)
        exits: list[_Exit] = []
        while writer.room:
            state.hidden.push(state.backbone.embed(ids[0, -1:]))
            found = self._first_exit(state, ids, deep, writer.draft, watch)
            if found is None:
                writer.stop("depth")
                break
            writer.add(found.choice, found.confidence, layer=found.layer)
            exits.append(found)
            deep = found.features
            ids = torch.cat([ids, ids.new_tensor([[found.choice.token]])], dim=1)
        return self._with_siblings(writer.draft, exits)

    def _with_siblings(self, draft: Draft, exits: list[_Exit]) -> Draft:
        """The chain, with second guesses at its places as far as they pay their rows."""
        if self._siblings is None or not exits:
            return draft
        _, cost, most = self._siblings
        path, offers = 1.0, []
        for parent, found in enumerate(exits, start=ROOT):
            guesses = found.guesses or Known([], [])
            offers += [
                Offer(path * said, said, parent, rank, guesses, found.layer)
                for rank, said in enumerate(guesses.chances)
                if rank > 0
            ]
            path *= guesses.chances[0] if guesses.chances else 0.0
            draft.chances.append(path)
        tree = Tree(draft, cost, most, paid=cost.beside_rows(draft))
        tree.take(offers)
        return tree.finished()

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
            choose = self._choose if self._siblings is None else self._guess
            found = choose(head, logits, layer, ids)
            watch.lap("heads")
            if found is not None:
                choice, confidence, guesses = found
                return _Exit(layer, choice, confidence, features, guesses)
        return None

    def _choose(
        self, head: ExitHead, logits: Tensor, layer: int, ids: Tensor
    ) -> tuple[Choice, float, None] | None:
        """The token that leaves, and the controller's confidence; None: the judge is not sure."""
        # the one device read per judged layer
        top, (sure, confidence) = read_together(
            head.to_target_ids(logits.argmax(-1)), *self._confidences(logits, layer)
        )
        if not self._judge.exits(sure, layer):
            return None
        if self._sampler.is_plain_greedy and not self.beliefs:
            return Choice(top), confidence, None
        wide = head.to_target_logits(logits)
        return self._sampler.choose(ids, wide, believe=self.beliefs), confidence, None

    def _guess(
        self, head: ExitHead, logits: Tensor, layer: int, ids: Tensor
    ) -> tuple[Choice, float, Guesses] | None:
        """The same with all that may stand there. No controller asks for another confidence."""
        count = self._siblings.guesses if self._siblings else 1
        (tokens,), (chances,) = read(head, logits, self._judge.temperature(layer), count)
        if not self._judge.exits(chances[0], layer):
            return None
        guesses: Guesses = Known(tokens, chances)
        if not self._sampler.is_plain_greedy:
            guesses = processed(self._sampler, ids, head.to_target_logits(logits), count)
        choice = guesses.choice(0)
        return None if choice is None else (choice, chances[0], guesses)

    def _confidences(self, logits: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """The judge's and the controller's, [1] each, from draft logits [1, V_draft].

        Both look at the same annealed and calibrated law.
        """
        sure = self._judge.confidence(logits, layer)
        signal = self.controller.signal
        if signal is None or signal is top_probability:  # which is what the judge computes
            return sure, sure
        return sure, signal(logits / self._judge.temperature(layer))
