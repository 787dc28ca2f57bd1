"""An answer as a card to share: question and text, coloured by source, beside the speed-up."""

from __future__ import annotations

import io
import math
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, fontManager, get_font
from matplotlib.patches import Rectangle
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.segment import Segment
from rich.text import Text

from selfspec import files, pages
from selfspec.visualise.layers import LayerTrace, gain, givers, readable, source_counts

CARD = (1200, 675)  # pixels

_INK, _DIM, _PAPER, _OTHER = (pages.TONES[n].light for n in ("ink", "dim", "card", "other"))

_SIZES = (40, 36, 32, 29, 26, 23)
"""Font sizes of the answer, tried in turn until it fits; at the smallest, the answer is cut."""
_ASKED = 64  # columns of the question

_LEADING = 1.62
_CELL = 0.602  # line spacing, and width of a letter of DejaVu Sans Mono, in font sizes
_DPI = 72  # a point is a pixel

_WORDS, _ANSWER = "DejaVu Sans", "DejaVu Sans Mono"
"""Fonts that come with matplotlib: for the text beside the answer, and for the answer."""

_OTHERS = (
    *("DejaVu Sans", "Noto Sans Mono CJK SC", "Noto Sans CJK SC", "Noto Sans CJK JP"),
    *("WenQuanYi Zen Hei", "Noto Emoji", "Symbola"),
)


def save_card(trace: LayerTrace, path: Path) -> None:
    """Write the card as a PNG of 1200 x 675 pixels. Raises CannotWrite."""
    draft_gain, left, (width, height) = gain(trace), 388, CARD
    # the same trace gives the same file, which looks the same everywhere
    with mpl.rc_context({"font.family": families(_WORDS), "text.hinting": "none"}):
        sheet = _Sheet()
        sheet.box(0, 0, 340, height, pages.TONES["quiet"].light)
        factor = f"{draft_gain.speed_up:.1f}×"
        sheet.write(factor, 40, 206, 104 if len(factor) < 5 else 80, weight="bold")
        for number, text in enumerate(("as fast as", "plain decoding")):
            sheet.write(text, 46, 262 + 38 * number, 27)
        share = f"{100 * draft_gain.drafted / draft_gain.tokens:.0f} % came as drafts"
        sheet.write(share, 46, 344, 20, color=_DIM)
        if draft_gain.verdict:
            sheet.write(f"drafts {draft_gain.verdict}", 46, 374, 16, color=_DIM)
        sheet.write("selfspec", 46, height - 60, 26, weight="bold")
        name = drawable(readable(trace.info.base_model))
        sheet.write(cut_text(name, 34), 46, height - 34, 14, color=_DIM)
        top, question = 40, _question(trace.info.prompt)
        for number, text in enumerate(question):
            sheet.write(text, left, top + 20 + 28 * number, 20, color=_DIM)
        top += 28 * len(question) + 20 * bool(question)
        size, lines = _fit_answer(trace, width - left - 48, height - 74 - top)
        for number, line in enumerate(lines):
            sheet.line(line, left, top + number * _LEADING * size + size, size)
        sheet.legend(trace, left, height - 34, 16)
        with files.replacing(path) as new:
            sheet.figure.savefig(new, dpi=_DPI, metadata={"Software": "selfspec"})


def _question(prompt: str) -> list[str]:
    text = Text(" ".join(drawable(readable(prompt)).split()))
    first, *rest = (line.plain.rstrip() for line in text.wrap(_console(_ASKED), _ASKED))
    return [line for line in (first, cut_text(" ".join(rest), _ASKED)) if line]


def _console(columns: int) -> Console:
    return Console(width=columns, file=io.StringIO(), _environ={})


def _fit_answer(trace: LayerTrace, room: float, height: float) -> tuple[int, list[list[Segment]]]:
    """The font size and the lines of the answer that fit; code is not wrapped if that can be."""
    answer = Text()
    for text, giver in zip(trace.answer, givers(trace), strict=True):
        answer.append(drawable(readable(text)), giver.colour(trace.info.num_layers))
    count = answer.plain.count("\n") + 1
    code = [(size, count) for size in (*_SIZES, 20) if "```" in answer.plain]
    for size, allowed in (*code, *((size, math.inf) for size in _SIZES)):
        console = _console(int(room / (_CELL * size)))
        lines, limit = answer.wrap(console, console.width), int(height / (_LEADING * size))
        if len(lines) <= min(limit, allowed):
            break
    for line in lines:
        line.rstrip()
    if len(lines) > limit:
        lines[limit - 1].append(" …")
    return size, [list(line.render(console)) for line in lines[:limit]]


class _Sheet:
    """A figure in pixels from its upper left corner."""

    def __init__(self) -> None:
        width, height = CARD
        self.figure = Figure(figsize=(width / _DPI, height / _DPI), dpi=_DPI, facecolor=_PAPER)
        self._axes = self.figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
        self._axes.axis("off")

    def write(self, text: str, left: float, base: float, size: float, **look: Any) -> None:
        """Draw a line of text, in which formulas are not parsed."""
        look = {"color": _INK, "parse_math": False, "va": "baseline", **look}
        self._axes.text(left, base, text, fontsize=size, **look)

    def box(
        self, left: float, top: float, width: float, height: float, colour: str, alpha: float = 1.0
    ) -> None:
        look: dict[str, Any] = {"edgecolor": "none", "facecolor": colour, "alpha": alpha}
        self._axes.add_patch(Rectangle((left, top), width, height, **look))

    def line(self, line: list[Segment], left: float, base: float, size: float) -> None:
        """Draw a line of the answer; each draft is underlined, on the colour of its source."""
        for text, style, _ in line:
            width = _CELL * size * cell_len(text)
            if style is not None and style.color is not None:
                colour = style.color.get_truecolor().hex
                self.box(left, base - 1.02 * size, width, 1.36 * size, colour, alpha=0.2)
                self.box(left, base + 0.34 * size, width, 0.09 * size, colour)
            body = text.lstrip(" ")
            indent = _CELL * size * (len(text) - len(body))
            self.write(body, left + indent, base, size, family=families(_ANSWER))
            left += width

    def legend(self, trace: LayerTrace, left: float, base: float, size: float) -> None:
        for giver, count in source_counts(givers(trace)):
            colour = giver.colour(trace.info.num_layers) or _OTHER
            self.box(left, base - 0.76 * size, 0.8 * size, 0.8 * size, colour)
            text = f"{giver.words} {count}"
            look = {"color": _DIM, "family": families(_ANSWER)}
            self.write(text, left + 1.2 * size, base, size, **look)
            left += _CELL * size * len(text) + 2.6 * size


@cache
def families(first: str) -> list[str]:
    """The first font and installed others; matplotlib takes a glyph from the first that has it."""
    installed = set(fontManager.get_font_names())
    return [first, *(name for name in _OTHERS if name in installed)]


@cache
def _glyphs() -> frozenset[int]:
    fonts = (get_font(findfont(FontProperties(family=[name]))) for name in families(_WORDS))
    return frozenset(code for font in fonts for code in font.get_charmap())


def drawable(text: str) -> str:
    """The text with `U+XXXX` for each character that no installed font has."""
    return "".join(c if c == "\n" or ord(c) in _glyphs() else f"U+{ord(c):04X}" for c in text)


def cut_text(text: str, columns: int) -> str:
    """The text, cut to `columns`; Chinese characters and emoji take two."""
    if cell_len(text) <= columns:
        return text
    return set_cell_size(text, columns - 1).rstrip() + "…"
