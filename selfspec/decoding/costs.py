"""The cost of a round in plain steps. All such arithmetic is here, without tensors.

A plain step is one round without drafts: a pass of the whole model for one token, and its overhead.
`decoding.measure` measures the cost of rows and heads on this machine; drafters, the never-slower
rule, calibration and the pages share one `DraftCost`.
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

USUAL_COST = 0.08  # cost of a further row, and of asking a head, in plain steps, if not measured

# asking a head for one more sequence in the same call, as a share of asking for the first:
# arithmetic adds 0.06, the drafts' Python more. With 8 sequences from bfloat16 weights, 1.10 times
# as fast as a share of 1 (SmolLM2-135M, two cores with AMX)
ASKING_ONE_MORE = 0.4


@dataclass
class Load:
    """The number of sequences in the current round; the engine updates it."""

    texts: int = 1


@dataclass(frozen=True, kw_only=True)
class DraftCost:
    """The cost that drafting adds to a round, as a share of a round without drafts."""

    rows: tuple[float, ...]  # a pass's second row, its third ..; the last holds for all beyond
    load: Load = field(default_factory=Load)
    token: float = 0.0  # a draft token of a second model or of attending heads
    head: float = 0.0  # asking an exit head once
    num_layers: int = 1

    @classmethod
    def with_costs(cls, costs: Costs, num_layers: int) -> DraftCost:
        head = USUAL_COST if costs.head is None else costs.head
        rows, token = costs.rows or (USUAL_COST,), costs.token or 0.0
        return cls(rows=rows, head=head, token=token, num_layers=num_layers)

    @property
    def row_costs(self) -> tuple[float, ...]:
        """The verification cost of a sequence's first draft token, its second, and so on."""
        return batch_row_costs(self.rows, self.load.texts)

    @property
    def head_call(self) -> float:
        """The cost of asking a head for every sequence of the batch: all wait, as one call asks."""
        texts = self.load.texts
        return self.head * (1 + ASKING_ONE_MORE * (texts - 1)) / whole_round(self.rows, texts)

    @property
    def per_token(self) -> float:
        """The cost of an exit head's first draft token, without the layers below the exit."""
        return self.row_costs[0] + self.head_call

    def of(self, draft: Draft) -> float:
        """The cost of `draft`, without tokens of `FREE` sources: these are drafted in any case."""
        origins = [(token.source, token.layer) for token in draft.proposed]
        rows = zip(costs_by_row(self.row_costs), origins, strict=False)
        verification = sum(row for row, (source, _) in rows if source not in FREE)
        return verification + self.drafting(origins, draft.heads)

    def drafting(self, origins: Sequence[tuple[str, int]], heads: int) -> float:
        """The cost of drafts before verification; `origins`: each draft's source and exit layer.

        A draft that exits at layer l of L runs l / L of a step on its own. A difficult token costs
        nothing: verification continues where it stopped.
        """
        exit_layers = [layer for source, layer in origins if source not in FREE]
        token_costs = sum(self.token + layer / self.num_layers for layer in exit_layers)
        return token_costs + self.head_call * heads

    def steps(self, origins: Sequence[tuple[str, int]], heads: int = 0) -> float:
        """The cost of a round with these drafts, in plain steps. Rows of every source count."""
        rows = sum(islice(costs_by_row(self.row_costs), len(origins)))
        return 1.0 + rows + self.drafting(origins, heads)

    def gain(self, rounds: Sequence[Round]) -> float:
        """The speed-up of `rounds` over plain decoding; the prompt's round is left out."""
        verifications = [entry for entry in rounds if not entry.prefill]
        steps = sum(self.steps(entry.origins, entry.heads) for entry in verifications)
        return sum(len(entry.tokens) for entry in verifications) / steps if steps else 1.0


def costs_by_row(costs: Sequence[float]) -> Iterator[float]:
    """The costs of the second row, the third, and so on without end."""
    return chain(costs, repeat(costs[-1]))


@cache
def batch_row_costs(rows: tuple[float, ...], texts: int) -> tuple[float, ...]:
    """`DraftCost.rows` for a batch of `texts` sequences, each of which adds one row at a time.

    Entry i is the time that the n rows of step i add, as a share of a round in which each of the n
    sequences has one row. Such a round is worth one token to each sequence.
    """
    if texts == 1:
        return rows
    round_cost = whole_round(rows, texts)
    levels = range(1, 2 + len(rows) // texts)  # all further rows cost the same
    bounds = ((level * texts - 1, (level + 1) * texts - 1) for level in levels)
    return tuple(sum(islice(costs_by_row(rows), *bound)) / round_cost for bound in bounds)


@cache
def whole_round(rows: tuple[float, ...], texts: int) -> float:
    """The cost of a round in which each of `texts` sequences has one row, in plain steps."""
    return 1.0 + sum(islice(costs_by_row(rows), texts - 1))


def token_cost_without(skipped: Sequence[int], model: Backbone) -> float:
    """The cost of a token that skips layers (from 1 on), in steps: its share of the weights."""
    return 1.0 - sum(_bytes(model.layers[layer - 1]) for layer in skipped) / _bytes(model.model)


def _bytes(part: nn.Module) -> int:
    return sum(weight.numel() * weight.element_size() for weight in part.parameters())


# --- the expected gain of exit heads' drafts


@dataclass(frozen=True)
class ExitOdds:
    """The probabilities of exits for one draft position of a round."""

    exits: tuple[float, ...]  # of an exit, by exit layer; the remainder to 1 is a difficult token
    accepted: float  # of an exit whose draft is accepted


def expected_gain(
    cost: DraftCost, layers: Sequence[int], first: ExitOdds, later: ExitOdds, width: int
) -> tuple[float, float]:
    """Compression rate and speed-up of drafts of at most `width` tokens.

    SpecBound's formula (shared reading: E[tokens] = (1 - a^(k+1)) / (1 - a), a round costs
    k D_max / L + (L - D_max) / L) with this machine's measured costs. Positions of a round are
    assumed to be independent, and drafts after a wrong one to exit as often as others.
    """
    tokens = reached = alive = steps = 1.0
    for row, odds in zip(costs_by_row(cost.rows), (first, *[later] * (width - 1)), strict=False):
        alive *= odds.accepted
        tokens += alive
        staying = reached
        for layer, share in zip(layers, odds.exits, strict=True):
            steps += staying * cost.head + reached * share * layer / cost.num_layers
            staying -= reached * share
        reached -= staying
        steps += reached * row
    return tokens, tokens / steps
