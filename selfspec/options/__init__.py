"""Settings of drafters, draft controllers, acceptance rules and prices: one dataclass each.

`SpeculationOptions` in `config` is made of them. To add one: a class in the module of its group,
and its name in that module's table. Imports no torch.
"""

from selfspec.options.controllers import (
    CmAsdLength,
    Fixed,
    GammaTune,
    GammaTunePlus,
    Heuristic,
    Threshold,
)
from selfspec.options.drafters import DraftModel, Exit, Ngram, NoDrafts
from selfspec.options.prices import Prices
from selfspec.options.rules import CmAsd, Easd, Lenient, Lossless

__all__ = [
    "CmAsd",
    "CmAsdLength",
    "DraftModel",
    "Easd",
    "Exit",
    "Fixed",
    "GammaTune",
    "GammaTunePlus",
    "Heuristic",
    "Lenient",
    "Lossless",
    "Ngram",
    "NoDrafts",
    "Prices",
    "Threshold",
]
