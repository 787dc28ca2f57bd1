"""CM-ASD's confidence, which its draft length and its acceptance rule both look at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from selfspec.options.parts import POSITIVE, Part, Range

_WEIGHTS = Range(
    lambda weights: len(weights) == 3 and min(weights) >= 0.0 and abs(sum(weights) - 1) < 1e-6,
    "of three weights, at least 0, that sum to 1",
    whole=True,
    most=1.0,
)


@dataclass(frozen=True, kw_only=True)
class Ensemble(Part):
    """A weighted mean of three signals."""

    weights: Annotated[tuple[float, ...], _WEIGHTS] = (0.4, 0.3, 0.3)
    """lambda: weights of entropy, logit margin and softmax margin, which sum to 1.

    Printed nowhere: the two margins say much the same.
    """

    margin_scale: Annotated[float, POSITIVE] = 1.0
    """beta, above 0: sharpness of the logit margin.

    Printed nowhere: 1 gives a sigmoid of the margin as it is, in nats.
    """
