"""Who gave a token, in words and in its colour: the same on pages, in pictures and on a terminal.

Called by `coloured`, `visualise`, and by `selfspec chat` and `demo`. Imports no torch.
"""

from __future__ import annotations

from typing import NamedTuple

from selfspec.decoding.sources import DRAFT_MODEL, EXIT, GRAMMAR, MODEL, NGRAM
from selfspec.pages import palette

NAMES = {
    MODEL: "the model",
    NGRAM: "text already seen",
    GRAMMAR: "the grammar",
    DRAFT_MODEL: "a draft model",
}


class Giver(NamedTuple):
    """Who gave a token."""

    source: str
    layer: int = 0
    """Of an exit head's draft; 0 is the embedding."""

    @property
    def words(self) -> str:
        """For people."""
        if self.source == EXIT:
            return f"exit layer {self.layer}" if self.layer else "the embedding"
        return NAMES[self.source]

    def colour(self, num_layers: int) -> str | None:
        """Of its tokens; None: the colour of all text."""
        if self.source == MODEL:
            return None
        return palette.of_source(self.source, self.layer, num_layers)
