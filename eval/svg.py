"""Pictures for README as SVG text, light and dark. Called by `race_picture` and `speed_chart`."""

from __future__ import annotations

from html import escape
from typing import NamedTuple


class Look(NamedTuple):
    """Colours, as `--card`, `--ink`, `--dim`, `--rule`, `--good`, `--other` of pages/look.css."""

    paper: str
    ink: str
    dim: str
    rule: str
    good: str
    other: str


LOOKS = {
    "light": Look("#ffffff", "#1b1e23", "#5d636d", "#dcdedf", "#0b7a53", "#b9bcc4"),
    "dark": Look("#1c1f25", "#e7e8ea", "#9aa1ac", "#32373f", "#4fd0a0", "#565c68"),
}


def document(width: int, height: float, look: Look, title: str, body: str, style: str = "") -> str:
    """A framed picture; `body` and `style` are markup already."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:g}" role="img" '
        'font-family="ui-monospace,SFMono-Regular,Menlo,Consolas,monospace" font-size="13.5">'
        f"<title>{escape(title)}</title><style>{style}</style>"
        f'<rect x=".5" y=".5" width="{width - 1}" height="{height - 1:g}" rx="10" '
        f'fill="{look.paper}" stroke="{look.rule}"/>{body}</svg>\n'
    )


def label(
    text: str, x: float, y: float, colour: str, *, weight: int = 400, anchor: str = "start"
) -> str:
    """Text, markup already, at a place."""
    return (
        f'<text x="{x:g}" y="{y:g}" fill="{colour}" font-weight="{weight}" '
        f'text-anchor="{anchor}" xml:space="preserve">{text}</text>'
    )
