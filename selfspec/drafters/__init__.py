"""What proposes tokens. `decode` knows the protocol only; options choose."""

from selfspec.drafters.base import Draft, Drafter, NoDrafter
from selfspec.drafters.choice import Sources, make_drafter
from selfspec.drafters.exit import ExitDrafter, known_deep
from selfspec.drafters.ngram import NgramDrafter, SeenTextFirst

__all__ = [
    "Draft",
    "Drafter",
    "ExitDrafter",
    "NgramDrafter",
    "NoDrafter",
    "SeenTextFirst",
    "Sources",
    "known_deep",
    "make_drafter",
]
