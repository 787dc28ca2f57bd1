"""Drafts from Medusa heads: each says a token further ahead, all from one verified state.

Comes in: the output of layer L from which the newest token was chosen. Goes out: guesses for a tree
of fixed shape, or for as much of it as pays. After Medusa-1 (Cai et al. 2024), which verifies the
whole tree in every round. Where it samples it keeps tokens that are typical of the model; here
guesses are drawn from the heads, and what stays has the model's distribution. Called by `choice`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec.decoding.drafters.base import Draft
from selfspec.decoding.drafters.heads import Guesses, HeadGuesser, Known
from selfspec.decoding.state import DecodeState
from selfspec.decoding.stats import Stopwatch
from selfspec.decoding.work import Steps, Work
from selfspec.heads.exit_heads import ExitHeads
from selfspec.heads.heads import Answer, answer

CHOICES: dict[tuple[int, ...], int] = {
    (): 10,
    **dict(zip([(rank,) for rank in range(10)], [10, 7, 3, 2, *[1] * 6], strict=True)),
    **dict(zip([(0, rank) for rank in range(8)], [10, 3, 2, *[1] * 5], strict=True)),
    **{(1, 0): 2, (2, 0): 1, (0, 0, 0): 2},
}
"""Guesses behind a path of ranks: the 63 nodes of `mc_sim_7b_63` (FasterDecoding/Medusa,
medusa/model/medusa_choices.py), which grew by how often the ranks of Vicuna 7B's heads were right.
None is longer than four tokens: what a fifth head says is not used."""


@dataclass(eq=False, kw_only=True)
class AskAhead(Work):
    """All heads asked about the newest state of a text; gives an Answer of K rows."""

    heads: ExitHeads
    state: Tensor
    """[1, d]: the normed output of layer L."""
    temperature: float
    count: int
    """Tokens wanted of each."""

    @property
    def likeness(self) -> Hashable:
        return AskAhead, id(self.heads), self.temperature, self.count

    def done(self, alike: Sequence[AskAhead], _others: Sequence[Work]) -> list[Answer]:
        features = self.heads.ahead(torch.cat([work.state for work in alike]))
        head, each = self.heads.first, len(features) // len(alike)
        whole = answer(head, features, temperature=self.temperature, count=self.count)
        return [whole.part(slice(at, at + each)) for at in range(0, len(features), each)]


class MedusaGuesser(HeadGuesser):
    """Asks all heads once a round: what one says holds behind every path of its length."""

    once = True

    def begin(self, state: DecodeState) -> None:
        super().begin(state)
        self._said: Answer | None = None

    def ask(self, draft: Draft, asked: Sequence[int], watch: Stopwatch) -> Steps[list[Guesses]]:
        """Nothing where no state is known, or behind paths as long as there are heads."""
        if self._said is None and self._known is not None:
            self._said = yield AskAhead(
                heads=self._heads,
                state=self._known,
                temperature=self._judge.temperature(self.layer),
                count=min(self._count, CHOICES[()]),
            )
            watch.lap("heads")
        return [self._behind(draft, node) for node in asked]

    def _behind(self, draft: Draft, node: int) -> Guesses:
        ranks = _ranks(draft, node)
        count, place = CHOICES.get(ranks, 0), len(ranks)
        if self._said is None or place >= len(self._said.tokens) or count == 0:
            return Known([], [])
        row = self._said.part(slice(place, place + 1))
        (tokens,), (chances,) = row.tokens, row.chances
        return self._guesses(draft, node, row.logits, tokens[:count], chances[:count])


def _ranks(draft: Draft, node: int) -> tuple[int, ...]:
    """Ranks of the tokens down to one, each among its siblings; text already seen comes first."""
    parents = draft.parents
    return tuple(parents[:at].count(parents[at]) for at in draft.path(node))
