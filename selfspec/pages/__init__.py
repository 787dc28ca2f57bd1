"""HTML pages in one file: their common style, script helpers and strict content policy.

A page is a template with its style and script inside; it loads nothing. This module also has the
colours of everything that is drawn: pages, pictures, figures, the terminal. Background and text
colours have a light and a dark form; the sources of tokens have one colour that works on both.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from importlib.resources import files
from typing import NamedTuple


class Tone(NamedTuple):
    """A colour for light and for dark backgrounds."""

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
"""Colours other than those of token sources; `model`: the whole model at work."""

SEEN, GRAMMAR, SECOND = "#c98600", "#c2418f", "#5b6f8c"
"""Prompt lookup, the grammar, a draft model."""

REJECTED = "#e5484d"
"""A rejected draft on a terminal, whose background is unknown."""

RAMP = ("#1b9e77", "#3a7ce7", "#a054de")
"""Exit layers, from the embedding through the middle to the last layer."""


def of_layer(layer: int, num_layers: int) -> str:
    """The colour of an exit layer on the ramp, mixed as by CSS's color-mix in srgb."""
    place = min(layer / num_layers, 0.999) * (len(RAMP) - 1)
    low = int(place)
    pairs = zip(*(bytes.fromhex(colour[1:]) for colour in RAMP[low : low + 2]), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * (place % 1)):02x}" for a, b in pairs)


def page(
    package: str, name: str, scripts: Sequence[str], *rules: str, **values: str
) -> tuple[str, str]:
    """Fill `name`.html with `name`.css, `scripts` as one module, and `values`; return page and CSP.

    A value that looks like a placeholder is not filled again.
    """
    style = style_of(package, f"{name}.css")
    script = "\n".join((_asset(__name__, "dom.js"), *(_asset(package, file) for file in scripts)))
    values |= {"style": style, "script": script, "policy": policy(script, style, *rules)}
    template = _asset(package, f"{name}.html")
    html = re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], template)
    return html, values["policy"]


def style_of(package: str, name: str) -> str:
    """CSS of a page: the colours, the style of all pages, and its own style."""
    colours = {name: f"light-dark({tone.light}, {tone.dark})" for name, tone in TONES.items()}
    colours |= {"seen": SEEN, "grammar": GRAMMAR, "second": SECOND}
    colours |= dict(zip(("shallow", "middle", "deep"), RAMP, strict=True))
    lines = (":root {", *(f"  --{name}: {colour};" for name, colour in colours.items()), "}")
    return "\n".join((*lines, _asset(__name__, "look.css"), _asset(package, name)))


def policy(script: str, style: str, *more: str) -> str:
    """A Content-Security-Policy: nothing is loaded, only our script runs; `more`: directives."""
    digests = (hashlib.sha256(text.encode("utf-8")).digest() for text in (script, style))
    scripts, styles = (f"'sha256-{base64.b64encode(digest).decode('ascii')}'" for digest in digests)
    rules = ("default-src 'none'", f"script-src {scripts}", f"style-src {styles}", "img-src data:")
    return "; ".join((*rules, "base-uri 'none'", "form-action 'none'", *more))


def _asset(package: str, name: str) -> str:
    return (files(package) / "assets" / name).read_text(encoding="utf-8")
