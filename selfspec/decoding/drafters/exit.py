"""Drafts from exit heads: rows run through the hidden cache and wait where they left."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

from selfspec.decoding.controllers import DraftController
from selfspec.decoding.drafters.base import Draft, DraftWriter, PacedDrafter
from selfspec.decoding.drafters.guesses import Known, known_deep, processed
from selfspec.decoding.drafters.tree import ROOT, Guesses, Offer, Tree
from selfspec.decoding.prices import DraftCost
from selfspec.decoding.scores import Choice, Sampler
from selfspec.decoding.sequence import DecodeState
from selfspec.decoding.sources import EXIT
from selfspec.decoding.stats import Stopwatch
from selfspec.decoding.work import Ask, Embed, Steps
from selfspec.heads.answers import Answer
from selfspec.heads.confidence import top_probability
from selfspec.heads.exit_heads import ExitHeads
from selfspec.heads.judge import ExitJudge
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

    def draft(self, state: DecodeState, limit: int, watch: Stopwatch) -> Steps[Draft]:
        """A path of up to min(limit, W_max) tokens; the rows that gave it wait where they left."""
        writer = DraftWriter(self, limit, source=EXIT, sampled=self._sampler.do_sample)
        ids = state.ids
        deep = known_deep(self._heads, state)
        exits: list[_Exit] = []
        while writer.room:
            newest = writer.draft.tokens[-1:] or state.committed(-1)
            state.hidden.push((yield Embed(backbone=state.backbone, ids=newest)))
            found = yield from self._first_exit(state, ids, deep, writer.draft, watch)
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
    ) -> Steps[_Exit | None]:
        """The first confident layer and what it drafts; None: difficult token.

        `draft` counts the heads that are asked.

        Whether to exit is decided from the context alone, before a token is drawn: a decision that
        saw the drawn token would bias the output.
        """
        signal = self.controller.signal
        for boundary, layer in enumerate(state.hidden.schedule.depths[1:-1]):
            hidden = yield from state.hidden.advance(boundary)
            watch.lap("draft")
            head = self._heads[layer]
            draft.heads += 1
            said: Answer = yield Ask(
                head=head,
                hidden=hidden[-1:],  # the row being drafted
                deep=deep,
                temperature=self._judge.temperature(layer),
                count=1 if self._siblings is None else self._siblings.guesses,
                # the judge computes the top probability anyway
                signal=None if signal is top_probability else signal,
            )
            found = self._exit(head, said, layer, ids)
            watch.lap("heads")
            if found is not None:
                return found
        return None

    def _exit(self, head: ExitHead, said: Answer, layer: int, ids: Tensor) -> _Exit | None:
        """The token that leaves; None: the judge is not sure, or nothing is left to draw."""
        (tokens,), (chances,) = said.tokens, said.chances
        if not self._judge.exits(chances[0], layer):
            return None
        confidence = said.signals[0] if said.signals else chances[0]
        if self._siblings is None:
            if self._sampler.is_plain_greedy and not self.beliefs:
                choice = Choice(tokens[0])
            else:
                wide = head.to_target_logits(said.logits)
                choice = self._sampler.choose(ids, wide, believe=self.beliefs)
            return _Exit(layer, choice, confidence, said.features)
        guesses: Guesses = Known(tokens, chances)
        if not self._sampler.is_plain_greedy:
            wide = head.to_target_logits(said.logits)
            guesses = processed(self._sampler, ids, wide, self._siblings.guesses)
        best = guesses.choice(0)
        return None if best is None else _Exit(layer, best, confidence, said.features, guesses)
