"""Who gave a token, as a terminal shows it: a source and an exit layer come in, a style goes out.

The colours of text already seen, of grammars and of draft models are those of the pages
(pages/assets/look.css). Called by `selfspec chat`, `demo` and `trace`. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from selfspec.decoding.sources import DRAFT_MODEL, EXIT, GRAMMAR, MODEL, NGRAM

_RAMP = ((27, 158, 119), (58, 124, 231), (160, 84, 222))
"""RGB from the embedding to the last layer; all can be read on dark and on light."""

_COLOURS = {NGRAM: "#c98600", GRAMMAR: "#c2418f", DRAFT_MODEL: "#5b6f8c"}

_WORDS = {
    MODEL: "the whole model",
    NGRAM: "text already seen",
    GRAMMAR: "the grammar of a format",
    DRAFT_MODEL: "a draft model",
}


def style(source: str, layer: int, num_layers: int) -> str:
    """As rich reads it; the terminal's own colour for what the whole model gave."""
    if source == EXIT:
        red, green, blue = _colour(layer / num_layers)
        return f"rgb({red},{green},{blue})"
    return _COLOURS.get(source, "")


def words(source: str, layer: int) -> str:
    """The same, for people."""
    if source == EXIT:
        return f"the exit head at layer {layer}" if layer else "the exit head on the embedding"
    return _WORDS[source]


def legend(exit_layers: tuple[int, ...], num_layers: int) -> Iterator[tuple[str, str]]:
    """Words and style of each source that a model with these exit layers has."""
    exits = [(EXIT, layer) for layer in exit_layers]
    for source, layer in ((MODEL, 0), *exits, (NGRAM, 0), (GRAMMAR, 0), (DRAFT_MODEL, 0)):
        yield words(source, layer), style(source, layer, num_layers)


def _colour(depth: float) -> tuple[int, int, int]:
    """Between two neighbours of the ramp; `depth` in [0, 1]."""
    place = min(depth, 0.999) * (len(_RAMP) - 1)
    low, share = int(place), place % 1
    pairs = zip(_RAMP[low], _RAMP[low + 1], strict=True)
    red, green, blue = (round(a + (b - a) * share) for a, b in pairs)
    return red, green, blue
