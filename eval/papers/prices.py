"""What rounds should cost: their exact counts and measured parts come in, predicted seconds go out.

Wall time of a short run on a busy machine says little; the rounds that it took are exact. Priced by
parts that were measured once, two methods compare the same way on every run. Called by the scripts
in eval/papers.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch

from selfspec.api.speculator import Speculator
from selfspec.decoding.clock import Clock
from selfspec.decoding.drafters import DraftCache
from selfspec.decoding.measure import measure
from selfspec.decoding.prices import Costs
from selfspec.decoding.stats import GenerationStats
from selfspec.decoding.work import alone
from selfspec.errors import InvalidOption
from selfspec.heads.exit_heads import logit_lens
from selfspec.model.backbone import Backbone

_REPEATS = 15


@dataclass(frozen=True, kw_only=True)
class RoundCounts:
    """What a decoding did behind the prompt's pass."""

    tokens: int = 0
    """Committed."""
    accepted: int = 0
    by_drafts: Mapping[int, int] = field(default_factory=dict)
    """Rounds by how many tokens they drafted; a verification has one row more."""

    @property
    def rounds(self) -> int:
        """Verifications."""
        return sum(self.by_drafts.values())

    @property
    def drafted(self) -> int:
        """Draft tokens."""
        return sum(count * rounds for count, rounds in self.by_drafts.items())

    @property
    def rows(self) -> int:
        """Rows that the model ran, drafts and the newest token of each round."""
        return self.drafted + self.rounds

    def steps(self, draft_cost: float) -> float:
        """GammaTune's equation 6, in plain steps: a verification is one, a draft `draft_cost`."""
        return self.rounds + self.drafted * draft_cost


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Seconds."""

    verify: tuple[float, ...]
    """A round of 1, 2, .. rows without its drafts: layers, logits, verdicts."""
    draft: float
    """One draft token."""

    @property
    def draft_cost(self) -> float:
        """A draft token in plain steps: 1 / c of GammaTune's equation 1."""
        return self.draft / self.verify[0]

    def seconds(self, counts: RoundCounts) -> float:
        """Of all rounds."""
        return sum(
            rounds * (self.verify[drafts] + drafts * self.draft)
            for drafts, rounds in counts.by_drafts.items()
        )

    def plain_seconds(self, tokens: int) -> float:
        """Of plain decoding."""
        return tokens * self.verify[0]


def counts(stats: GenerationStats) -> RoundCounts:
    """Of one generation."""
    return RoundCounts(
        tokens=stats.accepted + stats.bonus,
        accepted=stats.accepted,
        by_drafts=by_drafts(stats.rounds, stats.drafted_by_index),
    )


def by_drafts(rounds: int, drafted_by_index: Mapping[int, int]) -> dict[int, int]:
    """Rounds by draft length, from how many drafted a first, a second, .. token."""
    longest = max(drafted_by_index, default=0)
    at_least = [rounds, *(drafted_by_index.get(index, 0) for index in range(1, longest + 1)), 0]
    found = {length: at_least[length] - at_least[length + 1] for length in range(longest + 1)}
    return {length: count for length, count in found.items() if count}


def total(parts: Iterable[RoundCounts]) -> RoundCounts:
    """All together."""
    every = list(parts)
    summed: Counter[int] = Counter()
    for part in every:
        summed.update(part.by_drafts)
    return RoundCounts(
        tokens=sum(part.tokens for part in every),
        accepted=sum(part.accepted for part in every),
        by_drafts=dict(sorted(summed.items())),
    )


def measured(speculator: Speculator, rows: int, context: int = 256) -> Prices:
    """Prices here, for rounds of up to `rows` rows; some seconds.

    Drafts come from the draft model, or from heads on the embedding, which run no layer. Raises
    InvalidOption for other heads: what their drafts cost depends on where they leave.
    """
    backbone, heads = speculator.backbone, speculator.heads
    if speculator.options.uses("draft-model") and speculator.draft_model is not None:
        lens = logit_lens(backbone.unembedding, backbone.num_layers, speculator.label)
        whole = measure(backbone, lens, rows=rows, context=context)
        return prices(whole, draft_seconds(speculator.draft_model, context))
    if heads is None or (speculator.options.exit.layers or heads.config.exit_layers) != (0,):
        raise InvalidOption("prices are for a draft model, or heads on the embedding (layer 0)")
    whole = measure(backbone, heads, rows=rows, context=context)
    return prices(whole, whole.head)


@torch.inference_mode()
def draft_seconds(
    draft_model: Backbone, context: int, now: Callable[[], float] = time.perf_counter
) -> float:
    """Median of 15 draft tokens behind `context` others, each read back."""
    cache = DraftCache(draft_model)
    length = min(context, draft_model.max_positions - 1) + 1
    ids = [0] * length
    alone(cache.run(ids))
    works = {"token": lambda: int(alone(cache.run(cache.rewind(ids))).argmax(-1))}
    return Clock(draft_model.device, _REPEATS, now).seconds(works)["token"]


def prices(costs: Costs, draft: float) -> Prices:
    """From a measured cost table and the seconds of a draft token."""
    rows = range(1, len(costs.layers) + 1)
    return Prices(verify=tuple(costs.step(row) for row in rows), draft=draft)
