"""What a round costs, in plain steps: the one home of these sums, without tensors.

A plain step is a pass of the whole model for one token, and all that a round does beside. What rows
and heads cost of it here, `decoding.measure` finds; drafters, the never-slower rule, calibration
and the pages go by the same `DraftCost`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain, islice, repeat
from typing import TYPE_CHECKING

from selfspec.decoding.stats import FREE, Round

if TYPE_CHECKING:
    from torch import nn

    from selfspec.decoding.acceptance import Draft
    from selfspec.model.backbone import Backbone
    from selfspec.options import Costs

USUAL = 0.08  # what a row adds, and what a head takes, in plain steps, where nobody measured it


@dataclass
class Load:
    """How many texts take part in a round, now: the engine keeps it true."""

    texts: int = 1


@dataclass(frozen=True, kw_only=True)
class DraftCost:
    """What drafting adds to a round, as a share of the round without."""

    rows: tuple[float, ...]  # a pass's second row, its third ..; the last holds for all beyond
    load: Load = field(default_factory=Load)
    token: float = 0.0  # a draft token of a second model, or of heads that attend
    head: float = 0.0  # an exit head asked
    num_layers: int = 1

    @classmethod
    def with_costs(cls, asked: Costs, num_layers: int) -> DraftCost:
        head = USUAL if asked.head is None else asked.head
        rows, token = asked.rows or (USUAL,), asked.token or 0.0
        return cls(rows=rows, head=head, token=token, num_layers=num_layers)

    @property
    def row_costs(self) -> tuple[float, ...]:
        """What a text's first draft token costs it in verification, its second, and so on."""
        return beside(self.rows, self.load.texts)

    @property
    def asking(self) -> float:
        """What asking a head costs a text: as many seconds as alone, so in tokens more."""
        return self.head * self.load.texts / whole_round(self.rows, self.load.texts)

    @property
    def per_token(self) -> float:
        """What the first draft token of an exit head takes, its layers left out."""
        return self.row_costs[0] + self.asking

    def of(self, draft: Draft) -> float:
        """Without tokens that take no work: they would be there without this."""
        origins = [(one.source, one.layer) for one in draft.proposed]
        rows = zip(each_row(self.row_costs), origins, strict=False)
        verified = sum(row for row, (source, _) in rows if source not in FREE)
        return verified + self.drafting(origins, draft.heads)

    def drafting(self, origins: Sequence[tuple[str, int]], heads: int) -> float:
        """What drafts took before verification; `origins`: who gave each, at which exit layer.

        A draft that left at layer l of L ran l / L of a step by itself. A difficult token did not:
        verification goes on where it stopped.
        """
        own = [layer for source, layer in origins if source not in FREE]
        layers = sum(self.token + layer / self.num_layers for layer in own)
        return layers + self.asking * heads

    def steps(self, origins: Sequence[tuple[str, int]], heads: int = 0) -> float:
        """A round with these drafts, in rounds without. All its rows count, from any source."""
        rows = sum(islice(each_row(self.row_costs), len(origins)))
        return 1.0 + rows + self.drafting(origins, heads)

    def gain(self, rounds: Sequence[Round]) -> float:
        """How many times as fast as without drafts; the prompt's round is left out."""
        behind = [entry for entry in rounds if not entry.prefill]
        steps = sum(self.steps(entry.origins, entry.heads) for entry in behind)
        return sum(len(entry.tokens) for entry in behind) / steps if steps else 1.0


def each_row(costs: Sequence[float]) -> Iterator[float]:
    """What the second row costs, the third, and so on without end."""
    return chain(costs, repeat(costs[-1]))


@cache
def beside(rows: tuple[float, ...], texts: int) -> tuple[float, ...]:
    """`DraftCost.rows` where each of `texts` texts takes one more row, then one more, and so on.

    In shares of a round in which each has one, which a token of each is worth: the time of n rows
    more, shared by n texts, over the round's, in which a text gets 1 / n of what it gets alone.
    """
    if texts == 1:
        return rows
    whole = whole_round(rows, texts)
    levels = range(1, 2 + len(rows) // texts)  # beyond, all rows cost the same
    ends = ((level * texts - 1, (level + 1) * texts - 1) for level in levels)
    return tuple(sum(islice(each_row(rows), *end)) / whole for end in ends)


@cache
def whole_round(rows: tuple[float, ...], texts: int) -> float:
    """A round in which each of `texts` texts has one row, in steps of one text."""
    return 1.0 + sum(islice(each_row(rows), texts - 1))


def token_cost_without(skipped: Sequence[int], model: Backbone) -> float:
    """A token without some layers (from 1 on), in steps: the share of weights that it reads."""
    return 1.0 - sum(_bytes(model.layers[at - 1]) for at in skipped) / _bytes(model.model)


def _bytes(part: nn.Module) -> int:
    return sum(one.numel() * one.element_size() for one in part.parameters())


# --- what drafts of exit heads should come to


@dataclass(frozen=True)
class Exits:
    """What drafting would do at one place of a round."""

    at: tuple[float, ...]  # chances to exit by exit layer; what is missing to 1: a difficult token
    right: float  # the chance to exit with a draft that stays


def expected(
    cost: DraftCost, layers: Sequence[int], first: Exits, later: Exits, width: int
) -> tuple[float, float]:
    """Compression rate and speed-up of drafts of at most `width` tokens.

    SpecBound's formula (shared reading: E[tokens] = (1 - a^(k+1)) / (1 - a), a round costs
    k D_max / L + (L - D_max) / L) with what a machine really does put in. Places of a round are
    taken as independent; drafts behind a wrong one are taken to exit as often as others.
    """
    tokens = reached = alive = steps = 1.0
    for row, found in zip(each_row(cost.rows), (first, *[later] * (width - 1)), strict=False):
        alive *= found.right
        tokens += alive
        staying = reached
        for layer, leaves in zip(layers, found.at, strict=True):
            steps += staying * cost.head + reached * leaves * layer / cost.num_layers
            staying -= reached * leaves
        reached -= staying
        steps += reached * row
    return tokens, tokens / steps
