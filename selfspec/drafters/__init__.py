"""What proposes tokens. `decode` knows the protocol only; options choose."""

from selfspec.drafters.base import Draft, Drafter, NoDrafter
from selfspec.drafters.choice import Sources, make_drafter
from selfspec.drafters.draft_model import (
    DraftCache,
    DraftModelDrafter,
    check_same_size,
    check_same_tokens,
)
from selfspec.drafters.exit import ExitDrafter, known_deep
from selfspec.drafters.ngram import NgramDrafter, SeenTextFirst

__all__ = [
    "Draft",
    "DraftCache",
    "DraftModelDrafter",
    "Drafter",
    "ExitDrafter",
    "NgramDrafter",
    "NoDrafter",
    "SeenTextFirst",
    "Sources",
    "check_same_size",
    "check_same_tokens",
    "known_deep",
    "make_drafter",
]
