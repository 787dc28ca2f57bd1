"""What proposes tokens. `decode` knows the protocol only; options choose."""

from selfspec.drafters.base import (
    Draft,
    Drafter,
    DraftsFrom,
    DraftWriter,
    NoDrafter,
    PacedDrafter,
)
from selfspec.drafters.choice import Sources, make_drafter, make_ngram, while_paying
from selfspec.drafters.draft_model import (
    DraftCache,
    DraftModelDrafter,
    check_same_size,
    check_same_tokens,
)
from selfspec.drafters.exit import ExitDrafter, known_deep
from selfspec.drafters.ngram import NgramDrafter, SeenTextFirst
from selfspec.drafters.paying import DraftCost, WhilePaying, heads_asked

__all__ = [
    "Draft",
    "DraftCache",
    "DraftCost",
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
    "WhilePaying",
    "check_same_size",
    "check_same_tokens",
    "heads_asked",
    "known_deep",
    "make_drafter",
    "make_ngram",
    "while_paying",
]
