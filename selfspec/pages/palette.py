"""The colours of everything that is drawn: pages, pictures, figures, the terminal.

Tones for paper and words come in a light and a dark form; who gave a token has one tone that can
be told on both. Called by `pages`, `visualise` and `eval`.
"""

from __future__ import annotations

from typing import NamedTuple

Rgb = tuple[int, int, int]


class Tone(NamedTuple):
    """A colour on light paper and on dark."""

    light: str
    dark: str


TONES = {
    "paper": Tone("#fbfbf9", "#14161a"),
    "card": Tone("#ffffff", "#1c1f25"),
    "ink": Tone("#1b1e23", "#e7e8ea"),
    "dim": Tone("#5d636d", "#9aa1ac"),
    "rule": Tone("#dcdedf", "#32373f"),
    "field": Tone("#868c96", "#757d89"),
    "quiet": Tone("#eef1f6", "#272c35"),
    "focus": Tone("#1456d8", "#7fb0ff"),
    "bad": Tone("#c8192e", "#ff6b74"),
    "good": Tone("#0b7a53", "#4fd0a0"),
    "other": Tone("#b9bcc4", "#565c68"),
    "model": Tone("#8fa3c4", "#6d83aa"),
}
"""What is not a giver of tokens; `model`: the whole model at work."""

SEEN, GRAMMAR, SECOND = "#c98600", "#c2418f", "#5b6f8c"
"""Prompt lookup, the grammar, a draft model."""

REJECTED = "#e5484d"
"""A draft that was not kept, where the paper is not known: on a terminal."""

RAMP = ("#1b9e77", "#3a7ce7", "#a054de")
"""Exit layers: the embedding, the middle, the last layer."""


def rgb(colour: str) -> Rgb:
    """The three channels of #rrggbb, 0 to 255."""
    red, green, blue = bytes.fromhex(colour.removeprefix("#"))
    return red, green, blue


def of_layer(layer: int, num_layers: int) -> str:
    """Where on the ramp an exit layer stands; mixed as by CSS's color-mix in srgb."""
    place = min(layer / num_layers, 0.999) * (len(RAMP) - 1)
    low = int(place)
    pairs = zip(rgb(RAMP[low]), rgb(RAMP[low + 1]), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * (place % 1)):02x}" for a, b in pairs)


def as_css() -> str:
    """All of them as custom properties of a page."""
    tones = [f"  --{name}: light-dark({tone.light}, {tone.dark});" for name, tone in TONES.items()]
    givers = {"seen": SEEN, "grammar": GRAMMAR, "second": SECOND}
    givers |= dict(zip(("shallow", "middle", "deep"), RAMP, strict=True))
    named = [f"  --{name}: {colour};" for name, colour in givers.items()]
    return "\n".join([":root {", *tones, *named, "}"])
