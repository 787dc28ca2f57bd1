"""Who gave a token, in words and in colour, everywhere the same. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import groupby
from typing import NamedTuple

from selfspec import pages
from selfspec.decoding.stats import EXIT, MODEL, SOURCES

NAMES = {name: one.words for name, one in SOURCES.items() if name != EXIT}


class Giver(NamedTuple):
    """Who gave a token."""

    source: str
    layer: int = 0  # exit layer of a head's draft; 0 is the embedding

    @property
    def words(self) -> str:
        """The giver's name, for people."""
        if self.source == EXIT:
            return f"exit layer {self.layer}" if self.layer else "the embedding"
        return SOURCES[self.source].words

    def colour(self, num_layers: int) -> str | None:
        """The colour of its tokens; None: the colour of all text."""
        if self.source == EXIT:
            return pages.of_layer(self.layer, num_layers)
        return SOURCES[self.source].colour


class Piece(NamedTuple):
    """What a token adds to an answer, and who gave it."""

    text: str  # empty within a character of several tokens
    giver: Giver


def html(text: str, pieces: Sequence[Piece], num_layers: int, note: str) -> str:
    """`text` coloured, then who gave what, and a `note`."""
    if "".join(piece.text for piece in pieces) != text:  # a tokenizer of another kind
        pieces = [Piece(text, Giver(MODEL))]
    runs = groupby(pieces, key=lambda piece: piece.giver)
    body = "".join(
        _span("".join(piece.text for piece in run), giver, num_layers) for giver, run in runs
    )
    found = sorted({piece.giver for piece in pieces} - {Giver(MODEL)})
    told = " · ".join([*(_span(one.words, one, num_layers) for one in found), escape(note)])
    return (
        f'<div><div style="white-space:pre-wrap;line-height:1.7">{body}</div>'
        f'<div style="font-size:.85em;opacity:.75;margin-top:.5em">{told}</div></div>'
    )


def _span(text: str, giver: Giver, num_layers: int) -> str:
    colour = giver.colour(num_layers)
    if colour is None or not text:
        return escape(text)
    return (
        f'<span title="a draft: {giver.words}" style="border-radius:3px;'
        f"background:color-mix(in srgb,{colour} 24%,transparent);"
        f"text-decoration:underline 2px {SOURCES[giver.source].line} {colour};"
        f'text-underline-offset:.26em">{escape(text)}</span>'
    )
