"""What proposes tokens. `decode` knows the protocol only; options choose."""

from selfspec.decoding.drafters.base import (
    Draft,
    Drafter,
    DraftsFrom,
    DraftWriter,
    NoDrafter,
    PacedDrafter,
)
from selfspec.decoding.drafters.choice import (
    Sources,
    make_drafter,
    make_ngram,
    make_tree,
    while_paying,
)
from selfspec.decoding.drafters.draft_model import (
    DraftCache,
    DraftModelDrafter,
    check_same_size,
    check_same_tokens,
)
from selfspec.decoding.drafters.heads import (
    LEAST_SAID,
    ROOT,
    ExitDrafter,
    Guesses,
    Known,
    TreeDrafter,
    WhilePaying,
    known_deep,
)
from selfspec.decoding.drafters.ngram import NgramDrafter, SeenTextFirst

__all__ = [
    "LEAST_SAID",
    "ROOT",
    "Draft",
    "DraftCache",
    "DraftModelDrafter",
    "DraftWriter",
    "Drafter",
    "DraftsFrom",
    "ExitDrafter",
    "Guesses",
    "Known",
    "NgramDrafter",
    "NoDrafter",
    "PacedDrafter",
    "SeenTextFirst",
    "Sources",
    "TreeDrafter",
    "WhilePaying",
    "check_same_size",
    "check_same_tokens",
    "known_deep",
    "make_drafter",
    "make_ngram",
    "make_tree",
    "while_paying",
]
