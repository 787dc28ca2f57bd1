"""An answer as HTML, each piece in the colour of who gave it: for notebooks.

Pieces come in, one element without a script goes out. Text is only ever text. Colours are those of
all pages; the ink is the notebook's own, so it can be read on light and on dark.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby
from typing import NamedTuple

from selfspec import pages
from selfspec.decoding.sources import DRAFT_MODEL, EXIT, GRAMMAR, MODEL, NGRAM


class Piece(NamedTuple):
    """What a token adds to an answer, and who gave it."""

    text: str
    """Empty within a character of several tokens."""
    source: str
    """exit, ngram, draft-model or grammar: a draft that was accepted. model: the whole model."""
    layer: int | None
    """Of an exit head; 0: the embedding."""


_LOOKS = {
    EXIT: ("", "solid", "an exit head"),
    NGRAM: ("seen", "dotted", "text already seen"),
    GRAMMAR: ("grammar", "dashed", "the grammar"),
    DRAFT_MODEL: ("second", "double", "the draft model"),
}
"""Name of a colour, kind of line, words."""


def html(text: str, pieces: Sequence[Piece], num_layers: int, note: str) -> str:
    """`text` coloured, then who gave what, and a `note`."""
    if "".join(piece.text for piece in pieces) != text:  # a tokenizer of another kind
        pieces = [Piece(text, MODEL, None)]
    runs = groupby(pieces, key=lambda piece: piece[1:])
    body = "".join(
        _span("".join(piece.text for piece in run), source, layer, num_layers)
        for (source, layer), run in runs
    )
    told = " · ".join([*_legend(pieces, num_layers), escape(note)])
    return (
        f'<div><div style="white-space:pre-wrap;line-height:1.7">{body}</div>'
        f'<div style="font-size:.85em;opacity:.75;margin-top:.5em">{told}</div></div>'
    )


def _legend(pieces: Iterable[Piece], num_layers: int) -> list[str]:
    """Each giver that occurs, in its own colour."""
    found = dict.fromkeys((piece.source, piece.layer) for piece in pieces)
    return [
        _span(_named(source, layer), source, layer, num_layers)
        for source, layer in sorted(found, key=lambda giver: (giver[0], giver[1] or 0))
        if source != MODEL
    ]


def _span(text: str, source: str, layer: int | None, num_layers: int) -> str:
    if source == MODEL or not text:
        return escape(text)
    name, line, _ = _LOOKS[source]
    colour = pages.colour(name) if name else pages.layer_colour(layer or 0, num_layers)
    return (
        f'<span title="a draft of {_named(source, layer)}" style="border-radius:3px;'
        f"background:color-mix(in srgb,{colour} 24%,transparent);"
        f'text-decoration:underline 2px {line} {colour};text-underline-offset:.26em">'
        f"{escape(text)}</span>"
    )


def _named(source: str, layer: int | None) -> str:
    """Who gave a piece, in words."""
    if source != EXIT:
        return _LOOKS[source][2]
    return f"the exit head at layer {layer}" if layer else "the exit head on the embedding"
