"""HTML pages in one file: what all of them share. Their look, words for elements, a strict policy.

A page is a template with a style and a script in it; it loads nothing. Here are the colours of all
that is drawn, too: pages, pictures, figures, the terminal. Tones for paper and words come in a
light and a dark form; who gave a token has one tone that can be told on both.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from importlib.resources import files
from typing import NamedTuple


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


def of_layer(layer: int, num_layers: int) -> str:
    """Where on the ramp an exit layer stands; mixed as by CSS's color-mix in srgb."""
    place = min(layer / num_layers, 0.999) * (len(RAMP) - 1)
    low = int(place)
    pairs = zip(*(bytes.fromhex(end[1:]) for end in RAMP[low : low + 2]), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * (place % 1)):02x}" for a, b in pairs)


def page(
    package: str, name: str, scripts: Sequence[str], *rules: str, **values: str
) -> tuple[str, str]:
    """`name`.html with `name`.css, with `scripts` as one module and with `values`; its policy.

    A value that looks like a place to fill stays as it is.
    """
    style = style_of(package, f"{name}.css")
    script = "\n".join((_asset(__name__, "dom.js"), *(_asset(package, one) for one in scripts)))
    values |= {"style": style, "script": script, "policy": policy(script, style, *rules)}
    template = _asset(package, f"{name}.html")
    html = re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], template)
    return html, values["policy"]


def style_of(package: str, name: str) -> str:
    """Colours, the look of all pages, and a page's own."""
    named = {name: f"light-dark({tone.light}, {tone.dark})" for name, tone in TONES.items()}
    named |= {"seen": SEEN, "grammar": GRAMMAR, "second": SECOND}
    named |= dict(zip(("shallow", "middle", "deep"), RAMP, strict=True))
    colours = (":root {", *(f"  --{name}: {said};" for name, said in named.items()), "}")
    return "\n".join((*colours, _asset(__name__, "look.css"), _asset(package, name)))


def policy(script: str, style: str, *more: str) -> str:
    """Nothing may be loaded from anywhere, and no script run but ours; `more`: directives."""
    digests = (hashlib.sha256(text.encode("utf-8")).digest() for text in (script, style))
    scripts, styles = (f"'sha256-{base64.b64encode(one).decode('ascii')}'" for one in digests)
    rules = ("default-src 'none'", f"script-src {scripts}", f"style-src {styles}", "img-src data:")
    return "; ".join((*rules, "base-uri 'none'", "form-action 'none'", *more))


def _asset(package: str, name: str) -> str:
    return (files(package) / "assets" / name).read_text(encoding="utf-8")
