"""What drafts gained an answer: a LayerTrace and costs come in, counts and a headline go out.

One home of these words: the page, the card, the pictures and the terminal show them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from selfspec.api.givers import Giver
from selfspec.decoding.prices import Costs
from selfspec.decoding.sources import DRAFT_MODEL, EXIT, GRAMMAR, MODEL, NGRAM
from selfspec.decoding.stats import GenerationStats
from selfspec.visualise.layers import LayerTrace, Place

LOGIT_LENS = "logit-lens"
"""Kind of a head that nobody fitted: the model's own output layer."""


@dataclass(frozen=True, kw_only=True)
class Gain:
    """Of one answer."""

    tokens: int
    drafted: int
    """Of them, those that came as drafts and were kept."""
    per_verification: float
    speed_up: float | None
    """Over plain decoding, by what passes cost on this machine; None: not known."""

    @property
    def headline(self) -> str:
        """What was gained, in a line."""
        if not self.drafted:
            words = "No draft was kept: each token took a pass of the whole model"
            return f"{words}, {self.rate}" if self._times is not None and self._times < 1 else words
        share = f"{self.drafted / self.tokens:.0%}".replace("%", " %")
        verdict = f", which {self.verdict}:" if self.verdict else ","
        return f"{share} of this answer {self.came}{verdict} {self.rate}"

    @property
    def came(self) -> str:
        """How drafts came: for nothing only where the answer is known to be faster with them."""
        gained = self._times is not None and self._times > 1
        return "came for nothing" if gained else "came as drafts"

    @property
    def verdict(self) -> str:
        """What drafts did that gained nothing; empty if they did, or nobody knows."""
        if self._times is None or self._times > 1:
            return ""
        return "cost more than they gave" if self._times < 1 else "cost what they gave"

    @property
    def rate(self) -> str:
        """The one number beside the share."""
        if self._times is None:
            return f"{self.per_verification:.1f} tokens per verification"
        return f"{self._times:.1f}× plain decoding"

    @property
    def _times(self) -> float | None:
        """The speed-up as it is read: words must fit the number beside them."""
        return None if self.speed_up is None else round(self.speed_up, 1)


def gain(trace: LayerTrace, costs: Costs | None = None) -> Gain:
    """Drafts of a draft model have no costs here, so there is no speed-up with them."""
    stats = GenerationStats(num_layers=trace.info.num_layers)
    for entry in trace.rounds:
        stats.add(entry)
    speed_up = None
    if costs is not None and stats.rounds and DRAFT_MODEL not in stats.drafted_by_source:
        plain = (stats.accepted + stats.bonus) * costs.plain_step()
        speed_up = plain / costs.seconds_of(trace.rounds)
    return Gain(
        tokens=stats.new_tokens,
        drafted=stats.accepted,
        per_verification=stats.compression_rate,
        speed_up=speed_up,
    )


def givers(trace: LayerTrace) -> list[Giver]:
    """Of each token."""
    found: list[Giver] = []
    for entry in trace.rounds:
        kept = [Giver(entry.sources[index], entry.exit_layers[index]) for index in entry.kept]
        found += kept + [Giver(MODEL)] * (len(entry.tokens) - entry.accepted)
    return found


def counted(found: Sequence[Giver]) -> list[tuple[Giver, int]]:
    """How many tokens each gave: the model first, then text already seen, then by layer."""
    order = {MODEL: 0, NGRAM: 1, GRAMMAR: 2, DRAFT_MODEL: 3, EXIT: 4}
    return sorted(Counter(found).items(), key=lambda pair: (order[pair[0].source], pair[0].layer))


def right_from(trace: LayerTrace, place: Place) -> int | None:
    """The layer from which on every first guess is the token.

    num_layers at the latest; None if not even the whole model prefers the token: it was drawn.
    """
    if place.final_top_tokens[0] != place.token:
        return None
    first = trace.info.num_layers
    for said in reversed(place.layers):
        if said.top_tokens[0] != place.token:
            break
        first = said.layer
    return first


def head_right(trace: LayerTrace, place: Place) -> int | None:
    """The first layer whose fitted head guesses the token, whatever deeper layers say."""
    looked = zip(place.layers, trace.info.head_kinds, strict=True)
    fitted = (said for said, kind in looked if kind != LOGIT_LENS)
    return next((said.layer for said in fitted if said.top_tokens[0] == place.token), None)
