"""Building blocks of drafters: base classes, controllers of the draft length, guesses for trees.

A drafter asks its controller before a round and after each draft token, and reports what was kept.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from selfspec import options as parts
from selfspec.config import SpeculationOptions
from selfspec.decoding.acceptance import Draft
from selfspec.decoding.sampling import DraftToken, Sampler
from selfspec.decoding.state import DecodeState, Steps
from selfspec.decoding.stats import Ended, Stopwatch
from selfspec.heads.heads import Ensemble, Signal, top_probability


class Trunks(Protocol):
    """Proposes chains without work: prompt lookup, or text that a grammar forces."""

    def propose(self, state: DecodeState, limit: int, rival: float = 0.0) -> Draft:
        """Up to `limit` tokens; none unless more than `rival` are expected to be accepted."""

    def learn(self, draft: Draft, kept: Sequence[int]) -> None:
        """Learn from the latest draft: `kept` are the indices of its accepted tokens."""


class PacedDrafter:
    """Base of drafters whose controller sets the draft length; drafts stop at an end token."""

    def __init__(self, controller: DraftController, end_tokens: Collection[int] = ()) -> None:
        self.controller, self.end_tokens = controller, frozenset(end_tokens)

    def learn(self, draft: Draft, kept: Sequence[int]) -> None:
        """Tell the controller; rounds without drafts say nothing about draft lengths."""
        if draft.proposed:
            self.controller.end(draft.depth, len(kept))


@dataclass(frozen=True)
class Drafting:
    """How a drafter turns its logits into a chain."""

    sampler: Sampler  # the target's
    controller: DraftController
    end_tokens: Collection[int] = ()
    beliefs: bool = False  # whether tokens keep the drafter's distribution at their position


class ChoosingDrafter(PacedDrafter):
    """Base of drafters that choose tokens from logits."""

    def __init__(self, drafting: Drafting) -> None:
        super().__init__(drafting.controller, drafting.end_tokens)
        self.sampler, self.beliefs = drafting.sampler.for_drafts(), drafting.beliefs


class DraftWriter:
    """Writes one Draft, until W_max, `limit`, the controller or an end token completes it."""

    def __init__(self, drafter: PacedDrafter, limit: int, *, source: str) -> None:
        width = drafter.controller.begin()
        self.room = max(min(width, limit), 0)  # tokens that still fit; 0 when the draft is complete
        self.draft = Draft(ended="width" if width <= limit else "budget")
        self._source, self._drafter = source, drafter

    def add(self, choice: DraftToken, confidence: float) -> None:
        proposed = self.draft.proposed
        proposed.append(choice._replace(parent=len(proposed) - 1, source=self._source))
        self.room -= 1
        if choice.token in self._drafter.end_tokens:
            self.stop("eos")
        elif self.room and not self._drafter.controller.go_on(confidence):
            self.stop("unsure")

    def stop(self, reason: Ended) -> None:
        self.draft.ended = reason
        self.room = 0


# --- controllers, which set a round's draft length from earlier rounds


class DraftController:
    """Sets the draft lengths of one drafter for one sequence. This base class keeps one length.

    With a `threshold` a draft ends after a token of lower confidence: Hugging Face's
    `assistant_confidence_threshold` (GammaTune's baseline AssistantThreshold; Mamou et al. 2024),
    applied to the draft's top probability, since the drawn token's would bias samples.
    """

    signal: Signal | None = None  # the confidence that `go_on` needs, from a token's distribution

    def __init__(self, length: int, threshold: float | None = None) -> None:
        self._length = length
        self._threshold = 0.0 if threshold is None else threshold
        if threshold is not None:
            self.signal = top_probability

    def begin(self) -> int:
        """W_max of the round that begins, at least 1."""
        return self._length

    def go_on(self, confidence: float) -> bool:
        """Whether to continue after a token of this confidence; asked while W_max leaves room."""
        return confidence >= self._threshold

    def end(self, drafted: int, accepted: int) -> None:
        """Learn from a round's drafts; not called for rounds without drafts."""


class BoundedController(DraftController):
    """Base of controllers whose length varies between bounds."""

    def __init__(self, length: int, settings: parts.Bounded, longest: int) -> None:
        """No draft exceeds `longest`, whatever `settings` says."""
        self._shortest, self._longest = settings.shortest, longest
        super().__init__(int(self._clip(length)), getattr(settings, "threshold", None))

    def _clip(self, length: float) -> float:
        return min(float(self._longest), max(float(self._shortest), length))


class Heuristic(BoundedController):
    """Adds two to the length when all drafts were accepted, else subtracts one.

    Hugging Face's schedule "heuristic" (GammaTune's baseline HFHeuristic), with bounds.
    """

    def end(self, drafted: int, accepted: int) -> None:
        self._length = int(self._clip(self._length + (2 if accepted == drafted else -1)))


class GammaTune(BoundedController):
    """An exponential mean of accepted lengths, GammaTune section 4.1.

    | document | here |
    |---|---|
    | gamma | the length of a round; if the drafter stopped earlier, the number of drafts |
    | A | `accepted`, plus delta when all drafts of a round were accepted |
    | delta, eta | options `step`, `rate` |
    | gamma_min, gamma_max | the bounds |

    Algorithm 1 assigns gamma twice, which would discard the first value; the text describes
    equation 8 with the increased A. With a `threshold` this is GammaTune+, section 4.2.
    """

    def __init__(self, length: int, settings: parts.GammaTune, longest: int) -> None:
        super().__init__(length, settings, longest)
        self._rate, self._step = settings.rate, settings.step
        self._mean = float(self._length)

    def end(self, drafted: int, accepted: int) -> None:
        """Equations 7 and 8, then gamma = ceil(mean)."""
        length = accepted + self._step if accepted == drafted else accepted
        self._mean = self._clip((1 - self._rate) * self._mean + self._rate * length)
        self._length = math.ceil(self._mean)


class CmAsdLength(BoundedController):
    """CM-ASD's draft length, section III-B (b): as long as the drafter is confident.

    `k = min(k_max, max(k_min, floor(alpha * mean(C) * k_max)))`, where k_min and k_max are the
    bounds, alpha is the option `scale`, C the ensemble. The document averages C over the *next*
    k_max positions, which a sequential drafter cannot know; here over those drafted so far.
    """

    def __init__(self, settings: parts.CmAsdLength, longest: int) -> None:
        super().__init__(longest, settings, longest)
        self.signal = Ensemble(settings.weights, settings.margin_scale)
        self._scale = settings.scale

    def begin(self) -> int:
        self._drafted, self._total = 0, 0.0
        return self._longest

    def go_on(self, confidence: float) -> bool:
        self._drafted += 1
        self._total += confidence
        mean = self._total / self._drafted
        return self._drafted < self._clip(math.floor(self._scale * mean * self._longest))


def make_controller(options: SpeculationOptions, length: int) -> DraftController:
    settings, longest = options.controller, options.longest_draft(length)
    if isinstance(settings, parts.CmAsdLength):
        return CmAsdLength(settings, longest)
    if isinstance(settings, parts.GammaTune):
        return GammaTune(length, settings, longest)
    if isinstance(settings, parts.Bounded):
        return Heuristic(length, settings, longest)
    return DraftController(length, getattr(settings, "threshold", None))


# --- guesses: candidates to follow a token of a tree

ROOT = -1  # stands for the newest committed token in place of a draft token's index


class Guesser(Protocol):
    """Guesses the tokens that follow the tokens of a draft."""

    source: str  # of its tokens, by the names in `stats`
    asks_once: bool  # whether a round's first question answers the later ones, which are then free

    def begin(self, state: DecodeState) -> None:
        """Begin a round; its draft follows the text of `state`."""

    def ask(self, draft: Draft, nodes: Sequence[int], watch: Stopwatch) -> Steps[list[Likeliest]]:
        """Guesses after each of `nodes`: ROOT, or tokens of `draft` whose parents were asked."""


@dataclass(frozen=True)
class Likeliest:
    """The tokens that the target is likeliest to choose, by descending chance."""

    tokens: Sequence[int]
    chances: Sequence[float]

    def best(self, count: int | None) -> Likeliest:
        return Likeliest(self.tokens[:count], self.chances[:count])

    def without(self, token: int) -> tuple[Likeliest, float]:
        """The guesses without `token`, with unchanged chances, and the chance of `token`."""
        chances = dict(zip(self.tokens, self.chances, strict=True))
        chance = chances.pop(token, 0.0)
        return Likeliest([*chances], [*chances.values()]), chance
