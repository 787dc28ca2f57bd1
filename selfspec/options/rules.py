"""Settings of acceptance rules: what decides how many drafts stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from selfspec.options.ensemble import Ensemble
from selfspec.options.parts import AMOUNT, Amount, Part, Probability, Range, Rank, Share

READINGS = ("intent", "paper")


@dataclass(frozen=True, kw_only=True)
class Lossless(Part):
    """Greedy match, or speculative sampling: the output is the model's own."""

    kind: ClassVar[str] = "lossless"
    reads_beliefs: ClassVar[bool] = False
    """Whether it looks at the whole law of each draft token."""


@dataclass(frozen=True, kw_only=True)
class Lenient(Part):
    """Speculative sampling that keeps more drafts. Lossy below a lenience of 1."""

    kind: ClassVar[str] = "lenient"
    reads_beliefs: ClassVar[bool] = False

    lenience: Share = 0.6
    """In (0, 1]: a sampled draft stays when u < p / (q * lenience).

    Measured at this value: eval/results/papers/lenience.
    """


@dataclass(frozen=True, kw_only=True)
class CmAsd(Ensemble):
    """Drafts close to the model's best token stay. Lossy."""

    kind: ClassVar[str] = "cm-asd"
    reads_beliefs: ClassVar[bool] = True

    reading: Annotated[str, Range(READINGS.__contains__, "intent or paper")] = "intent"
    """intent: stricter where the drafter is unsure, as the document's text says; paper: looser, as
    its formula does."""

    top_beta: Rank = 3
    """beta, at least 1: a draft must be among so many best tokens.

    Printed nowhere.
    """

    tolerance: Amount = 0.1
    """tau_base, at least 0, in nats below the best token.

    The document's example.
    """

    tolerance_gain: Amount = 0.9
    """gamma, at least 0, in nats: what confidence (intent) or its lack (paper) adds.

    Printed nowhere: with tolerance 0.1 a token may be e times less likely than the best.
    """


@dataclass(frozen=True, kw_only=True)
class Easd(Part):
    """No drafts where both models waver between the same tokens. Lossy."""

    kind: ClassVar[str] = "easd"
    reads_beliefs: ClassVar[bool] = True

    entropy: Annotated[float | None, AMOUNT] = None
    """tau_H, at least 0, in nats. None: that of the heads, by selfspec calibrate --entropy."""

    overlap: Probability = 0.8
    """tau_O, in [0, 1]: more than this share of the best tokens is the same in both."""

    tokens: Rank = 5
    """N, at least 1: how many best tokens are compared."""


Acceptance = Lossless | Lenient | CmAsd | Easd

ACCEPTANCE: dict[str, type[Acceptance]] = {
    one.kind: one for one in (Lossless, Lenient, CmAsd, Easd)
}
"""By name."""
