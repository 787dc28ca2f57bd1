"""What matplotlib can draw with the fonts of this machine: text comes in, drawable text goes out.

Called by `picture`.
"""

from __future__ import annotations

from functools import cache

from matplotlib.font_manager import FontProperties, findfont, fontManager, get_font
from rich.cells import cell_len, set_cell_size

_WANTED = (
    "DejaVu Sans Mono",  # comes with matplotlib
    "DejaVu Sans",
    "Noto Sans Mono CJK SC",
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "WenQuanYi Zen Hei",
    "Noto Emoji",
    "Symbola",
)


@cache
def families(first: str = _WANTED[0]) -> list[str]:
    """Those wanted families that are installed; matplotlib takes a glyph from the first with it."""
    installed = set(fontManager.get_font_names())
    wanted = (first, *(name for name in _WANTED if name != first))
    return [name for name in wanted if name in installed]


def drawable(text: str) -> str:
    """The text with `U+XXXX` for each character that no font here has."""
    return "".join(c if ord(c) in _glyphs() else f"U+{ord(c):04X}" for c in text)


def fitting(text: str, columns: int) -> str:
    """The text, cut to so many columns; Chinese characters and emoji take two."""
    if cell_len(text) <= columns:
        return text
    return set_cell_size(text, columns - 1).rstrip() + "…"


@cache
def _glyphs() -> frozenset[int]:
    """Code points that the families have in both weights that are drawn."""
    found: set[int] = set()
    for family in families():
        maps = [
            get_font(findfont(FontProperties(family=[family], weight=weight))).get_charmap().keys()
            for weight in ("normal", "bold")
        ]
        found.update(maps[0] & maps[1])
    return frozenset(found)
