"""An answer as HTML, each piece in the colour of who gave it: for notebooks.

Pieces come in, one element without a script goes out. Text is only ever text. Colours are those of
all pages; the ink is the notebook's own, so it can be read on light and on dark.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby
from typing import NamedTuple

from selfspec.api.givers import Giver
from selfspec.decoding.sources import DRAFT_MODEL, EXIT, GRAMMAR, MODEL, NGRAM


class Piece(NamedTuple):
    """What a token adds to an answer, and who gave it."""

    text: str
    """Empty within a character of several tokens."""
    giver: Giver


_LINES = {EXIT: "solid", NGRAM: "dotted", GRAMMAR: "dashed", DRAFT_MODEL: "double"}
"""For eyes that see no colours."""


def html(text: str, pieces: Sequence[Piece], num_layers: int, note: str) -> str:
    """`text` coloured, then who gave what, and a `note`."""
    if "".join(piece.text for piece in pieces) != text:  # a tokenizer of another kind
        pieces = [Piece(text, Giver(MODEL))]
    runs = groupby(pieces, key=lambda piece: piece.giver)
    body = "".join(
        _span("".join(piece.text for piece in run), giver, num_layers) for giver, run in runs
    )
    told = " · ".join([*_legend(pieces, num_layers), escape(note)])
    return (
        f'<div><div style="white-space:pre-wrap;line-height:1.7">{body}</div>'
        f'<div style="font-size:.85em;opacity:.75;margin-top:.5em">{told}</div></div>'
    )


def _legend(pieces: Iterable[Piece], num_layers: int) -> list[str]:
    """Each giver that occurs, in its own colour."""
    found = sorted({piece.giver for piece in pieces})
    return [_span(giver.words, giver, num_layers) for giver in found if giver.source != MODEL]


def _span(text: str, giver: Giver, num_layers: int) -> str:
    colour = giver.colour(num_layers)
    if colour is None or not text:
        return escape(text)
    return (
        f'<span title="a draft: {giver.words}" style="border-radius:3px;'
        f"background:color-mix(in srgb,{colour} 24%,transparent);"
        f"text-decoration:underline 2px {_LINES[giver.source]} {colour};"
        f'text-underline-offset:.26em">{escape(text)}</span>'
    )
