"""Draft controllers: how many tokens a round drafts, from how earlier rounds went.

A drafter asks its controller before a round, after each draft token, and tells it afterwards what
was kept. With exit heads that sets W_max of the next round, while the judge keeps the depth. To add
a controller: a class here, its settings in `selfspec.options`, a line in
`make_controller`.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

from selfspec import options as asked
from selfspec.config import SpeculationOptions
from selfspec.heads.heads import Ensemble, Signal, top_probability


class DraftController(Protocol):
    """Sets the draft lengths of one drafter on one sequence."""

    @property
    def signal(self) -> Signal | None:
        """What `go_on` wants to know of each draft token's law; None: nothing."""

    @property
    def longest(self) -> int:
        """What `begin` never exceeds."""

    def begin(self) -> int:
        """W_max of the round that begins, at least 1."""

    def go_on(self, confidence: float) -> bool:
        """Whether to draft on behind a token of this confidence; asked while W_max leaves room."""

    def end(self, drafted: int, accepted: int) -> None:
        """What became of a round's drafts; not told of rounds without any."""


class Bounds(NamedTuple):
    """Shortest and longest draft."""

    low: int
    high: int

    def clip(self, length: float) -> float:
        """`length`, or the bound that it exceeds."""
        return min(float(self.high), max(float(self.low), length))


class Fixed:
    """The same length in every round."""

    signal: Signal | None = None

    def __init__(self, length: int) -> None:
        self._length = length

    @property
    def longest(self) -> int:
        """The length."""
        return self._length

    def begin(self) -> int:
        """The length."""
        return self._length

    def go_on(self, confidence: float) -> bool:  # noqa: ARG002  # the protocol's
        """Always."""
        return True

    def end(self, drafted: int, accepted: int) -> None:
        """Nothing is learnt."""


class Bounded(Fixed):
    """A length that moves between bounds."""

    def __init__(self, length: int, bounds: Bounds) -> None:
        super().__init__(int(bounds.clip(length)))
        self._bounds = bounds

    @property
    def longest(self) -> int:
        """The upper bound."""
        return self._bounds.high


class Heuristic(Bounded):
    """Two more when all drafts were accepted, else one less.

    Hugging Face's schedule "heuristic" (GammaTune's baseline HFHeuristic), with bounds. A drafter
    may stop before the length is reached: what counts is that all it drafted was kept.
    """

    def end(self, drafted: int, accepted: int) -> None:
        """+2 or -1."""
        step = 2 if accepted == drafted else -1
        self._length = int(self._bounds.clip(self._length + step))


class Threshold(Fixed):
    """A fixed length, cut short behind a token of low confidence.

    Hugging Face's `assistant_confidence_threshold` (GammaTune's baseline AssistantThreshold; Mamou
    et al. 2024), on the draft's top probability: that of the drawn token would bias samples. The
    unsure token itself is still proposed, as there: it is paid for.
    """

    def __init__(self, length: int, threshold: float) -> None:
        super().__init__(length)
        self.signal = top_probability
        self._threshold = threshold

    def go_on(self, confidence: float) -> bool:
        """Whether the token was sure enough."""
        return confidence >= self._threshold


class GammaTune(Bounded):
    """An exponential mean of accepted lengths, GammaTune section 4.1.

    | document | here |
    |---|---|
    | gamma | the length of a round; where the drafter stopped before it, what was drafted |
    | A | `accepted`, raised by delta when all drafts of a round were |
    | delta, eta | `step`, `rate` |
    | gamma_min, gamma_max | `bounds` |

    Algorithm 1 assigns gamma twice and would lose the first; equation 8 read with the raised A is
    what the text describes.
    """

    def __init__(self, length: int, bounds: Bounds, rate: float, step: float) -> None:
        super().__init__(length, bounds)
        self._rate = rate
        self._step = step
        self._mean = float(self._length)

    def end(self, drafted: int, accepted: int) -> None:
        """Equations 7 and 8, then gamma = ceil(mean)."""
        seen = accepted + self._step if accepted == drafted else accepted
        self._mean = self._bounds.clip((1 - self._rate) * self._mean + self._rate * seen)
        self._length = math.ceil(self._mean)


class GammaTunePlus(GammaTune):
    """GammaTune that also stops behind a token of low top probability, section 4.2."""

    def __init__(
        self, length: int, bounds: Bounds, rate: float, step: float, threshold: float
    ) -> None:
        super().__init__(length, bounds, rate, step)
        self.signal = top_probability
        self._threshold = threshold

    def go_on(self, confidence: float) -> bool:
        """Whether the token was sure enough."""
        return confidence >= self._threshold


class CmAsdLength:
    """CM-ASD's draft length, section III-B (b): as long as the drafter is confident.

    `k = min(k_max, max(k_min, floor(alpha * mean(C) * k_max)))`, where k_min and k_max are
    `bounds`, alpha is `scale`, C the ensemble. The document averages C over the *next* k_max
    positions, which a sequential drafter cannot know: here over those drafted so far, and k is
    found anew after each.
    """

    def __init__(self, bounds: Bounds, scale: float, signal: Signal) -> None:
        self.signal: Signal | None = signal
        self._bounds = bounds
        self._scale = scale
        self._drafted = 0
        self._total = 0.0

    @property
    def longest(self) -> int:
        """k_max."""
        return self._bounds.high

    def begin(self) -> int:
        """k_max."""
        self._drafted, self._total = 0, 0.0
        return self._bounds.high

    def go_on(self, confidence: float) -> bool:
        """Whether k, from all tokens of the round, leaves room."""
        self._drafted += 1
        self._total += confidence
        mean = self._total / self._drafted
        return self._drafted < self._bounds.clip(math.floor(self._scale * mean * self._bounds.high))

    def end(self, drafted: int, accepted: int) -> None:
        """Nothing is learnt."""


def make_controller(options: SpeculationOptions, length: int) -> DraftController:
    """The controller that `options` name, starting at `length`."""
    wanted = options.controller
    if isinstance(wanted, asked.Threshold):
        return Threshold(length, wanted.threshold)
    if isinstance(wanted, asked.Fixed):
        return Fixed(length)
    bounds = Bounds(wanted.shortest, options.longest_draft(length))
    if isinstance(wanted, asked.CmAsdLength):
        return CmAsdLength(bounds, wanted.scale, Ensemble(wanted.weights, wanted.margin_scale))
    if isinstance(wanted, asked.GammaTunePlus):
        return GammaTunePlus(length, bounds, wanted.rate, wanted.step, wanted.threshold)
    if isinstance(wanted, asked.GammaTune):
        return GammaTune(length, bounds, wanted.rate, wanted.step)
    return Heuristic(length, bounds)
