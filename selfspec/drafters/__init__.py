"""What proposes tokens. `decode` knows the protocol only; options choose."""

from selfspec.drafters.base import (
    Draft,
    Drafter,
    DraftsFrom,
    DraftWriter,
    NoDrafter,
    PacedDrafter,
)
from selfspec.drafters.choice import Sources, make_drafter, make_ngram
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
    "DraftWriter",
    "Drafter",
    "DraftsFrom",
    "ExitDrafter",
    "NgramDrafter",
    "NoDrafter",
    "PacedDrafter",
    "SeenTextFirst",
    "Sources",
    "check_same_size",
    "check_same_tokens",
    "known_deep",
    "make_drafter",
    "make_ngram",
]
