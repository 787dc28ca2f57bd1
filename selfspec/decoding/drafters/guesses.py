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
from selfspec.heads.confidence import likeliest
from selfspec.heads.exit_heads import ExitHeads
from selfspec.heads.judge import ExitJudge
from selfspec.heads.types import ExitHead


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

    def __init__(self, law: Tensor, sampler: Sampler, count: int) -> None:
        """`law` [V]; at most `count` are drawn."""
        self._law, self._sampler, self._count = law, sampler, count
        best = law.topk(min(count, len(law))).values
        self.chances: list[float] = [chance for chance in best.tolist() if chance > 0.0]

    def choice(self, rank: int) -> Choice | None:  # noqa: ARG002  # the protocol's
        """The next draw; None where rounding left nothing to draw from."""
        law = self._law
        total = law.sum()
        if not bool(total > 0.0):
            return None
        law = law / total
        token = self._sampler.draw(law)
        self._law = law.clone()
        self._law[token] = 0.0
        return Choice(token, law)

    def without(self, token: int) -> tuple[Drawn, float]:
        """From what is left of the law, and its probability."""
        law = self._law.clone()
        law[token] = 0.0
        return Drawn(law, self._sampler, self._count), float(self._law[token])


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

    def ask(self, draft: Draft, asked: Sequence[int], watch: Stopwatch) -> list[Guesses]:
        """One product over all of `asked`, and one device read."""
        state, head = self._state, self._head
        newest = state.committed(-1)
        ids = state.ids.new_tensor([(newest if n == ROOT else draft.tokens[n:])[0] for n in asked])
        hidden = state.backbone.embed(ids)
        watch.lap("draft")
        features = head.features(hidden, self._deep(draft, asked))
        self._features |= zip(asked, features.split(1), strict=True)
        logits = head.unembed(features)
        best = read(head, logits, self._judge.temperature(self.layer), self._count)
        found = [
            self._guesses(draft, node, logits[row : row + 1], tokens, said)
            for row, (node, tokens, said) in enumerate(zip(asked, *best, strict=True))
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
        return Drawn(law, sampler, count)
    best = law.topk(min(count, len(law)))
    return Known(best.indices.tolist(), best.values.tolist())


def read(
    head: ExitHead, logits: Tensor, temperature: float, count: int
) -> tuple[list[list[int]], list[list[float]]]:
    """The likeliest `count` tokens by draft logits [n, V_draft], and their chances, falling.

    One device read; float32 is exact up to 2^24 token ids.
    """
    indices, chances = likeliest(logits, temperature, count)
    tokens, said = torch.stack([head.to_target_ids(indices).float(), chances.float()]).tolist()
    return [[*map(int, row)] for row in tokens], said


def known_deep(heads: ExitHeads, state: DecodeState) -> Tensor | None:
    """What heads read beside the hidden state of the newest token, [1, d]; None if nothing."""
    if state.deep is None or not heads.reads_deep:
        return None
    normed: Tensor = state.backbone.unembedding.norm(state.deep)
    return normed
