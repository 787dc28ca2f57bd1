"""Drafts from successors: what verification found likely behind the same tokens before.

Comes in: the target's logits of committed rows. Goes out: guesses for a tree, around text already
seen; for any model, without heads. As Token Recycling (Luo et al. 2024), whose table goes by the
last token alone: here the last two come first. All texts of a model share the table, so drafts
depend on what was written before, and no text does. Called by `choice` and the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor

from selfspec.decoding.acceptance import AcceptanceRule, Proposed, Target, Verdict
from selfspec.decoding.drafters.base import Committed, Draft
from selfspec.decoding.drafters.heads import Guesses, Known
from selfspec.decoding.stats import SUCCESSORS, Stopwatch
from selfspec.decoding.work import Steps, ready

KEPT = 8
"""Successors of an entry."""

_MOST = 1 << 16
"""Entries of each order; the oldest make room."""

_PRIOR = (
    (0.5, 0.09, 0.05, 0.03, 0.02, 0.015, 0.01, 0.01),
    (0.25, 0.08, 0.06, 0.04, 0.03, 0.02, 0.02, 0.02),
)
"""About how often each rank was right: behind two known tokens, and where the last alone was known
(SmolLM2-135M, 48 Spec-Bench questions)."""

_CREDIT = 100.0
"""Places that these count as, beside those that this table was asked about."""


class Successors:
    """The likeliest followers of two tokens, and of one."""

    def __init__(self) -> None:
        self._tables: tuple[dict[object, Sequence[int]], ...] = ({}, {})
        self._right = [[_CREDIT * rate for rate in rates] for rates in _PRIOR]
        self._asked = [_CREDIT for _ in _PRIOR]

    def behind(self, tokens: Sequence[int]) -> Known:
        """What may follow a text that ends so, with the chances that this table's ranks have."""
        if (known := self._found(tokens)) is None:
            return Known([], [])
        order, found = known
        rates = (right / self._asked[order] for right in self._right[order])
        return Known(found, [*accumulate(rates, min)][: len(found)])

    def learn(self, tokens: Sequence[int], likely: Sequence[int], token: int) -> None:
        """Note what the target held likeliest behind a text that ends so, and that `token` came."""
        if known := self._found(tokens):
            order, found = known
            self._asked[order] += 1.0
            if token in found:
                self._right[order][found.index(token)] += 1.0
        for table, key in zip(self._tables, _keys(tokens), strict=True):
            table.pop(key, None)  # it is the newest now
            table[key] = likely
            if len(table) > _MOST:
                del table[next(iter(table))]

    def _found(self, tokens: Sequence[int]) -> tuple[int, Sequence[int]] | None:
        for order, key in enumerate(_keys(tokens)):
            if (found := self._tables[order].get(key)) is not None:
                return order, found
        return None


def _keys(tokens: Sequence[int]) -> tuple[object, object]:
    return tuple(tokens[-2:]), tokens[-1]


class Remembering:
    """An acceptance rule beside which a table learns from every row that it decides."""

    def __init__(self, rule: AcceptanceRule, table: Successors, newest: Sequence[int]) -> None:
        """`newest`: the last two ids of the prompt, or its only one."""
        self._rule, self._table, self._newest = rule, table, list(newest)
        self.lossless = rule.lossless

    def verdict(self, ids: Tensor, target: Target, row: int, proposed: Proposed) -> Verdict:
        found = self._rule.verdict(ids, target, row, proposed)
        likely = target.logits[row].topk(min(KEPT, target.logits.shape[-1])).indices.tolist()
        self._table.learn(self._newest, likely, found.token)
        self._newest = [self._newest[-1], found.token]
        return found


class SuccessorGuesser:
    """Asks the table; nothing is computed."""

    layer = 0
    source = SUCCESSORS
    once = False

    def __init__(self, table: Successors, count: int) -> None:
        """`count`: tokens for one place at most."""
        self._table, self._count = table, count

    def begin(self, state: Committed) -> None:
        self._newest = state.committed(-2)

    def ask(self, draft: Draft, asked: Sequence[int], _watch: Stopwatch) -> Steps[list[Guesses]]:
        count = self._count
        known = (self._table.behind([*self._newest, *draft.tokens_to(at)]) for at in asked)
        return ready([Known(one.tokens[:count], one.chances[:count]) for one in known])
