"""Draft controllers: how many tokens a round drafts, from how earlier rounds went.

A drafter asks its controller before a round, after each draft token, and tells it afterwards what
was kept. With exit heads that sets W_max of the next round, while the judge keeps the depth. To add
a controller: a class here, its settings in `selfspec.options`, a line in
`make_controller`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from selfspec import options as asked
from selfspec.config import SpeculationOptions
from selfspec.heads.heads import Ensemble, Signal, top_probability


class DraftController:
    """Sets the draft lengths of one drafter on one sequence; this one to the same in every round.

    With a `threshold` a draft is cut short behind a token of lower confidence: Hugging Face's
    `assistant_confidence_threshold` (GammaTune's baseline AssistantThreshold; Mamou et al. 2024),
    on the draft's top probability: that of the drawn token would bias samples. The unsure token
    itself is still proposed, as there: it is paid for.
    """

    signal: Signal | None = None
    """What `go_on` wants to know of each draft token's distribution; None: nothing."""

    def __init__(self, length: int, threshold: float | None = None) -> None:
        self._length = self.longest = length
        """`longest`: what `begin` never exceeds."""
        self._threshold = 0.0 if threshold is None else threshold
        if threshold is not None:
            self.signal = top_probability

    def begin(self) -> int:
        """W_max of the round that begins, at least 1."""
        return self._length

    def go_on(self, confidence: float) -> bool:
        """Whether to draft on behind a token of this confidence; asked while W_max leaves room."""
        return confidence >= self._threshold

    def end(self, drafted: int, accepted: int) -> None:
        """What became of a round's drafts; not told of rounds without any."""


class Bounds(NamedTuple):
    """Shortest and longest draft."""

    low: int
    high: int

    def clip(self, length: float) -> float:
        """`length`, or the bound that it exceeds."""
        return min(float(self.high), max(float(self.low), length))


class Heuristic(DraftController):
    """Two more when all drafts were accepted, else one less.

    Hugging Face's schedule "heuristic" (GammaTune's baseline HFHeuristic), with bounds. A drafter
    may stop before the length is reached: what counts is that all it drafted was kept.
    """

    def __init__(self, length: int, bounds: Bounds, threshold: float | None = None) -> None:
        super().__init__(int(bounds.clip(length)), threshold)
        self._bounds, self.longest = bounds, bounds.high

    def end(self, drafted: int, accepted: int) -> None:
        step = 2 if accepted == drafted else -1
        self._length = int(self._bounds.clip(self._length + step))


class GammaTune(Heuristic):
    """An exponential mean of accepted lengths, GammaTune section 4.1.

    | document | here |
    |---|---|
    | gamma | the length of a round; where the drafter stopped before it, what was drafted |
    | A | `accepted`, raised by delta when all drafts of a round were |
    | delta, eta | `step`, `rate` |
    | gamma_min, gamma_max | `bounds` |

    Algorithm 1 assigns gamma twice and would lose the first; equation 8 read with the raised A is
    what the text describes. With a `threshold` it is GammaTune+, section 4.2.
    """

    def __init__(
        self, length: int, bounds: Bounds, rate: float, step: float, threshold: float | None = None
    ) -> None:
        super().__init__(length, bounds, threshold)
        self._rate, self._step = rate, step
        self._mean = float(self._length)

    def end(self, drafted: int, accepted: int) -> None:
        """Equations 7 and 8, then gamma = ceil(mean)."""
        seen = accepted + self._step if accepted == drafted else accepted
        self._mean = self._bounds.clip((1 - self._rate) * self._mean + self._rate * seen)
        self._length = math.ceil(self._mean)


class CmAsdLength(DraftController):
    """CM-ASD's draft length, section III-B (b): as long as the drafter is confident.

    `k = min(k_max, max(k_min, floor(alpha * mean(C) * k_max)))`, where k_min and k_max are
    `bounds`, alpha is `scale`, C the ensemble. The document averages C over the *next* k_max
    positions, which a sequential drafter cannot know: here over those drafted so far, and k is
    found anew after each.
    """

    def __init__(self, bounds: Bounds, scale: float, signal: Signal) -> None:
        super().__init__(bounds.high)
        self.signal = signal
        self._bounds, self._scale = bounds, scale

    def begin(self) -> int:
        self._drafted, self._total = 0, 0.0
        return self._bounds.high

    def go_on(self, confidence: float) -> bool:
        self._drafted += 1
        self._total += confidence
        mean = self._total / self._drafted
        return self._drafted < self._bounds.clip(math.floor(self._scale * mean * self._bounds.high))


def make_controller(options: SpeculationOptions, length: int) -> DraftController:
    """The controller that `options` name, starting at `length`."""
    wanted = options.controller
    threshold = getattr(wanted, "threshold", None)
    if not isinstance(wanted, asked.Bounded):
        return DraftController(length, threshold)
    bounds = Bounds(wanted.shortest, options.longest_draft(length))
    if isinstance(wanted, asked.CmAsdLength):
        return CmAsdLength(bounds, wanted.scale, Ensemble(wanted.weights, wanted.margin_scale))
    if isinstance(wanted, asked.GammaTune):
        return GammaTune(length, bounds, wanted.rate, wanted.step, threshold)
    return Heuristic(length, bounds)
