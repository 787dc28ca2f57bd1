"""Settings of draft controllers: what sets the draft length of the next round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from selfspec.errors import InvalidOption
from selfspec.options.ensemble import Ensemble
from selfspec.options.parts import Amount, Part, Probability, Share, Width


@dataclass(frozen=True, kw_only=True)
class Fixed(Part):
    """The same length in every round."""

    kind: ClassVar[str] = "fixed"
    reads_confidence: ClassVar[bool] = False
    """Whether a token's confidence decides; such controllers know chains alone."""


@dataclass(frozen=True, kw_only=True)
class Bounded(Part):
    """A length that moves between bounds."""

    reads_confidence: ClassVar[bool] = False

    shortest: Width = 1
    """gamma_min, k_min, at least 1: no draft is asked to be shorter."""

    longest: Width = 10
    """gamma_max, k_max, at least 1: no draft is longer; in pinned mode never more than
    `pinned_rows - 1`.

    Printed nowhere: where verification starts to cost on a CPU.
    """

    def __post_init__(self) -> None:
        """Raise InvalidOption for bounds that leave no length."""
        super().__post_init__()
        if self.shortest > self.longest:
            raise InvalidOption(
                f"{self.kind}:shortest {self.shortest} exceeds {self.kind}:longest {self.longest}. "
                "Lower the one or raise the other"
            )


@dataclass(frozen=True, kw_only=True)
class Heuristic(Bounded):
    """Two more after a round that was kept, else one less."""

    kind: ClassVar[str] = "heuristic"


@dataclass(frozen=True, kw_only=True)
class Threshold(Part):
    """A fixed length, cut short behind an unsure draft."""

    kind: ClassVar[str] = "threshold"
    reads_confidence: ClassVar[bool] = True

    threshold: Probability = 0.4
    """Top probability, in [0, 1], from which drafting goes on.

    As in Hugging Face's `assistant_confidence_threshold`; GammaTune prints none.
    """


@dataclass(frozen=True, kw_only=True)
class GammaTune(Bounded):
    """An exponential mean of accepted lengths."""

    kind: ClassVar[str] = "gammatune"

    rate: Share = 0.3
    """eta, in (0, 1]: weight of the newest round in the mean.

    Printed nowhere.
    """

    step: Amount = 2.0
    """delta, at least 0: what a wholly accepted round counts more.

    Printed nowhere; the heuristic's own step.
    """


@dataclass(frozen=True, kw_only=True)
class GammaTunePlus(GammaTune):
    """GammaTune that also stops behind an unsure draft."""

    kind: ClassVar[str] = "gammatune-plus"
    reads_confidence: ClassVar[bool] = True

    threshold: Probability = 0.4
    """Top probability, in [0, 1], from which drafting goes on.

    As for the controller `threshold`.
    """


@dataclass(frozen=True, kw_only=True)
class CmAsdLength(Bounded, Ensemble):
    """As long as the drafter is confident."""

    kind: ClassVar[str] = "cm-asd"
    reads_confidence: ClassVar[bool] = True

    scale: Share = 1.0
    """alpha, in (0, 1]: share of `longest` that full confidence drafts.

    The document's "full confidence".
    """


Controller = Fixed | Threshold | Heuristic | GammaTune | CmAsdLength

CONTROLLERS: dict[str, type[Controller]] = {
    one.kind: one for one in (Fixed, Heuristic, Threshold, GammaTune, GammaTunePlus, CmAsdLength)
}
"""By name."""
