"""What exit heads think of the next token, for trees of drafts: the likeliest few, or draws.

Called by the tree drafter, a level of a tree at once, and by the exit drafter for siblings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec.decoding.drafters.base import Draft
from selfspec.decoding.drafters.tree import ROOT, Guesses
from selfspec.decoding.scores import Choice, Sampler
from selfspec.decoding.sequence import DecodeState
from selfspec.decoding.stats import Stopwatch
from selfspec.decoding.work import Ask, Embed, Steps
from selfspec.heads.answers import Answer
from selfspec.heads.exit_heads import ExitHeads
from selfspec.heads.judge import ExitJudge


@dataclass(frozen=True)
class Known:
    """The likeliest tokens, for greedy decoding."""

    tokens: Sequence[int]
    chances: Sequence[float]

    def choice(self, rank: int) -> Choice:
        """The token of a rank."""
        return Choice(self.tokens[rank])

    def without(self, token: int) -> tuple[Known, float]:
        """The others, and its chance."""
        if token not in self.tokens:
            return self, 0.0
        at = self.tokens.index(token)
        tokens, chances = list(self.tokens), list(self.chances)
        del tokens[at]
        said = chances.pop(at)
        return Known(tokens, chances), said


class Drawn:
    """Tokens drawn from a law without replacement.

    Each comes with the law that it was drawn from, what was drawn before taken out of it: tried in
    this order, each against what the ones before left of the target's law, they keep the target's
    distribution (recursive rejection sampling: Jeon et al. 2024, "Recursive Speculative Decoding").
    """

    def __init__(self, law: Tensor, sampler: Sampler, count: int, place: int) -> None:
        """`law` [V] of the token behind `place` ids; at most `count` are drawn."""
        self._law, self._sampler, self._count, self._place = law, sampler, count, place
        best = law.topk(min(count, len(law))).values
        self.chances: list[float] = [chance for chance in best.tolist() if chance > 0.0]

    def choice(self, rank: int) -> Choice | None:  # noqa: ARG002  # the protocol's
        """The next draw; None where rounding left nothing to draw from."""
        law = self._law
        total = law.sum()
        if not bool(total > 0.0):
            return None
        law = law / total
        token = self._sampler.draw(law, self._place)
        self._law = law.clone()
        self._law[token] = 0.0
        return Choice(token, law)

    def without(self, token: int) -> tuple[Drawn, float]:
        """From what is left of the law, and its probability."""
        law = self._law.clone()
        law[token] = 0.0
        return Drawn(law, self._sampler, self._count, self._place), float(self._law[token])


class HeadGuesser:
    """Asks the head of exit layer 0, which reads embeddings: no layer runs before verification."""

    layer = 0

    def __init__(self, heads: ExitHeads, judge: ExitJudge, sampler: Sampler, count: int) -> None:
        """`count`: guesses behind a token at most."""
        self._heads, self._head = heads, heads[self.layer]
        self._judge, self._sampler, self._count = judge, sampler.for_drafts(), count
        self._state: DecodeState
        self._known: Tensor | None = None
        """What the head reads beside the newest token's embedding, [1, d]."""
        self._features: dict[int, Tensor] = {}
        """What the head made of each token that was asked, [1, d]."""

    def begin(self, state: DecodeState) -> None:
        """A round begins."""
        self._state = state
        self._known = known_deep(self._heads, state)
        self._features = {}

    def ask(self, draft: Draft, asked: Sequence[int], watch: Stopwatch) -> Steps[list[Guesses]]:
        """One product over all of `asked`, and one device read."""
        state, head = self._state, self._head
        newest = state.committed(-1)
        ids = [(newest if n == ROOT else draft.tokens[n:])[0] for n in asked]
        hidden: Tensor = yield Embed(backbone=state.backbone, ids=ids)
        watch.lap("draft")
        said: Answer = yield Ask(
            head=head,
            hidden=hidden,
            deep=self._deep(draft, asked),
            temperature=self._judge.temperature(self.layer),
            count=self._count,
        )
        self._features |= zip(asked, said.features.split(1), strict=True)
        found = [
            self._guesses(draft, node, said.logits[row : row + 1], tokens, chances)
            for row, (node, tokens, chances) in enumerate(
                zip(asked, said.tokens, said.chances, strict=True)
            )
        ]
        watch.lap("heads")
        return found

    def _deep(self, draft: Draft, asked: Sequence[int]) -> Tensor | None:
        """What the head reads beside embeddings, [n, d]: its features one token earlier."""
        if not self._heads.reads_deep:
            return None
        if asked[0] == ROOT:
            return self._known
        parents = [(draft.parents or [])[node] for node in asked]
        return torch.cat([self._features[parent] for parent in parents])

    def _guesses(
        self, draft: Draft, node: int, logits: Tensor, tokens: list[int], chances: list[float]
    ) -> Guesses:
        """Behind one token; none where the judge is not sure. Draft logits [1, V_draft]."""
        if not self._judge.exits(chances[0], self.layer):
            return Known([], [])
        if self._sampler.is_plain_greedy:
            return Known(tokens, chances)
        path = self._state.ids.new_tensor([[draft.tokens[index] for index in draft.path(node)]])
        ids = torch.cat([self._state.ids, path], dim=1)
        return processed(self._sampler, ids, self._head.to_target_logits(logits), self._count)


def processed(sampler: Sampler, ids: Tensor, logits: Tensor, count: int) -> Guesses:
    """At most `count` guesses behind `ids` [1, n] under processors, or draws; logits [1, V]."""
    law = sampler.probs(ids, logits)
    if sampler.do_sample:
        return Drawn(law, sampler, count, ids.shape[1])
    best = law.topk(min(count, len(law)))
    return Known(best.indices.tolist(), best.values.tolist())


def known_deep(heads: ExitHeads, state: DecodeState) -> Tensor | None:
    """What heads read beside the hidden state of the newest token, [1, d]; None if nothing."""
    if state.deep is None or not heads.reads_deep:
        return None
    normed: Tensor = state.backbone.unembedding.norm(state.deep)
    return normed
