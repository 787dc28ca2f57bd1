"""What a round costs: the one home of these sums, without tensors.

`MeasuredCosts` are seconds, as `decoding.measure` finds them on this machine; `DraftCost` says in
shares of a plain step what drafting adds to a round, and the never-slower rule goes by it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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


@dataclass(frozen=True, kw_only=True)
class MeasuredCosts:
    """Seconds, measured on this machine. Tuples go by the number of rows: 1, 2, ..."""

    num_layers: int
    layers: tuple[float, ...]  # a pass through all L layers
    start: tuple[float, ...]  # of any pass, whatever its layers: positions, masks, queues
    logits: tuple[float, ...]  # the model's own head
    head: float  # one draft token embedded and judged by one exit head, and the answer read back
    round: float  # what a round costs beside layers and logits: verdicts, commit, rewinding

    def layer(self, rows: int) -> float:
        """One layer of a pass, beside the pass's start."""
        return (self.layers[rows - 1] - self.start[rows - 1]) / self.num_layers

    def verdict(self, rows: int) -> float:
        """A round's end: logits of all rows, and bookkeeping."""
        return self.logits[rows - 1] + self.round

    def step(self, rows: int) -> float:
        """A round that takes `rows` rows through all layers in one pass, drafts left out."""
        return self.layers[rows - 1] + self.verdict(rows)

    def plain_step(self) -> float:
        return self.step(1)

    def seconds(
        self,
        passes: Iterable[tuple[int, float, float]],
        rounds: Iterable[tuple[int, float]],
        heads: float,
    ) -> float:
        """Seconds of these rounds in all; how often may be an expectation.

        `passes`: rows, how many passes of so many rows, layers that they run in all; `rounds`:
        rows verified, how many rounds of so many; `heads`: how often one was asked.
        """
        found = heads * self.head
        for rows, count, layers in passes:
            found += count * self.start[rows - 1] + layers * self.layer(rows)
        return found + sum(count * self.verdict(rows) for rows, count in rounds)

    def seconds_of(self, rounds: Iterable[Round]) -> float:
        """Seconds of rounds behind the prompt, with drafts of exit heads or prompt lookup."""
        behind = [entry for entry in rounds if not entry.prefill]
        return self.seconds(
            [(rows, 1, last - first) for entry in behind for rows, first, last in entry.passes],
            [(len(entry.draft_tokens) + 1, 1) for entry in behind],
            sum(entry.heads for entry in behind),
        )


@dataclass(frozen=True)
class Exits:
    """What drafting would do at one place of a round."""

    at: tuple[float, ...]  # chances to exit by exit layer; what is missing to 1: a difficult token
    right: float  # the chance to exit with a draft that stays


def expected(
    costs: MeasuredCosts, layers: Sequence[int], first: Exits, later: Exits, width: int
) -> tuple[float, float]:
    """Compression rate and speed-up of drafts of at most `width` tokens.

    SpecBound's formula (shared reading: E[tokens] = (1 - a^(k+1)) / (1 - a), a round costs
    k D_max / L + (L - D_max) / L) with what a machine really does put in. Places of a round are
    taken as independent; drafts behind a wrong one are taken to exit as often as others.
    """
    tokens = reached = alive = 1.0
    difficult = heads = 0.0
    passes: list[tuple[int, float, float]] = []
    for place in range(width):
        found = first if place == 0 else later
        alive *= found.right
        tokens += alive
        staying, depth = reached, 0
        for layer, leaves in zip(layers, found.at, strict=True):
            heads += staying
            if layer > depth:
                passes.append((place + 1, staying, staying * (layer - depth)))
            staying, depth = staying - reached * leaves, layer
        difficult += staying
        reached -= staying
    # a difficult token, and all before it, have come through the shallow layers already
    deep = costs.num_layers - difficult * layers[-1]
    seconds = costs.seconds([*passes, (width + 1, 1.0, deep)], [(width + 1, 1.0)], heads)
    return tokens, tokens * costs.plain_step() / seconds


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
    def with_costs(cls, asked: Costs, model: Backbone) -> DraftCost:
        head = USUAL if asked.head is None else asked.head
        return cls(rows=asked.rows or (USUAL,), head=head, num_layers=model.num_layers)

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
        """Without tokens that take no work: they would be there without this.

        A draft token that left at layer l of L ran l / L of a step by itself. A difficult token did
        not: verification goes on where it stopped.
        """
        rows = zip(each_row(self.row_costs), draft.proposed, strict=False)
        return sum(row for row, one in rows if one.source not in FREE) + self.beside_rows(draft)

    def steps(self, draft: Draft) -> float:
        """A round with this draft, in rounds without. All its rows count, from any source."""
        rows = sum(islice(each_row(self.row_costs), len(draft.proposed)))
        return 1.0 + rows + self.beside_rows(draft)

    def beside_rows(self, draft: Draft) -> float:
        """How many of `steps` drafting itself took."""
        own = [one for one in draft.proposed if one.source not in FREE]
        layers = sum(self.token + one.layer / self.num_layers for one in own)
        return layers + self.asking * draft.heads


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
    """What the model takes for a token without some layers, counted from 1, as a share of a step.

    By the weights that are read.
    """
    return 1.0 - sum(_bytes(model.layers[at - 1]) for at in skipped) / _bytes(model.model)


def _bytes(part: nn.Module) -> int:
    return sum(one.numel() * one.element_size() for one in part.parameters())
