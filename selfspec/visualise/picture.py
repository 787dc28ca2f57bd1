"""An answer as a card to share: its text in the colours of who gave it, beside one number.

A LayerTrace comes in, a PNG file goes out. Called by `selfspec trace`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.backends.backend_agg import RendererAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, fontManager, get_font
from matplotlib.patches import Rectangle
from rich.cells import cell_len, set_cell_size

from selfspec import files
from selfspec.decoding.prices import Costs
from selfspec.pages import palette
from selfspec.visualise.layers import LayerTrace, counted, gain, givers, visible

CARD = (1200, 675)
"""Pixels."""

Width = Callable[[str], float]

_INK, _DIM, _PAPER, _OTHER = (palette.TONES[n].light for n in ("ink", "dim", "card", "other"))


class _Face(NamedTuple):
    """How the text of an answer is set."""

    size: float
    leading: float
    """From line to line."""


_FACES = tuple(_Face(size, 1.62 * size) for size in (40, 36, 32, 29, 26))
"""The largest that fits is taken; with the smallest the answer is cut."""


def save_card(trace: LayerTrace, path: Path, costs: Costs | None = None) -> None:
    """1200 x 675 pixels, PNG. Raises CannotWrite."""
    found, left, (width, height) = gain(trace, costs), 388, CARD
    # the same picture gives the same file, and looks the same everywhere
    with mpl.rc_context({"font.family": families(), "text.hinting": "none"}):
        drawn = ["\n".join(map(_shown, text.split("\n"))) for text in trace.answer]
        face, runs = _fitting(drawn, width - left - 48, height - 118)
        sheet = _Sheet(width, height)
        sheet.box(0, 0, 340, height, facecolor=palette.TONES["quiet"].light)
        sheet.write(f"{found.drafted / found.tokens:.0%}", 40, 206, 104, weight="bold")
        sheet.write("of this answer", 46, 262, 27)
        sheet.write(found.came, 46, 300, 27)
        sheet.write(found.rate, 46, 344, 20, color=_DIM)
        if found.verdict:
            sheet.write(f"drafts {found.verdict}", 46, 374, 16, color=_DIM)
        sheet.write("selfspec", 46, height - 60, 26, weight="bold")
        sheet.write(fitting(_shown(trace.info.base_model), 34), 46, height - 34, 14, color=_DIM)
        sheet.answer(trace, runs, left, 44, face)
        sheet.legend(trace, left, height - 34, 16)
        sheet.keep(path)


_DPI = 72
"""A point is a pixel."""


def _fitting(texts: Sequence[str], room: float, height: float) -> tuple[_Face, list[Run]]:
    """The largest face in which the answer fits; what does not fit is left out, with a sign."""
    for face in _FACES:
        runs = flow(texts, _width(face.size), room)
        most = int(height / face.leading)
        if not runs or runs[-1].line < most:
            return face, runs
    kept = [run for run in runs if run.line < most]
    last = kept[-1]
    return face, [*kept[:-1], last._replace(text=last.text.rstrip() + " …")]


class _Sheet:
    """A figure in pixels from its upper left corner."""

    def __init__(self, width: float, height: float) -> None:
        self.figure = Figure(figsize=(width / _DPI, height / _DPI), dpi=_DPI, facecolor=_PAPER)
        self._axes = self.figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
        self._axes.axis("off")

    def write(self, text: str, left: float, base: float, size: float, **look: Any) -> None:
        """A line of text; formulas are not read."""
        look = {"color": _INK, "parse_math": False, "va": "baseline", **look}
        self._axes.text(left, base, drawable(text), fontsize=size, **look)

    def box(self, left: float, top: float, wide: float, high: float, **look: Any) -> None:
        """A rectangle."""
        self._axes.add_patch(Rectangle((left, top), wide, high, edgecolor="none", **look))

    def answer(
        self, trace: LayerTrace, runs: Sequence[Run], left: float, top: float, face: _Face
    ) -> None:
        """The text; each draft on the colour of who gave it, and underlined."""
        width, who = _width(face.size), givers(trace)
        for run in runs:
            at, base = left + run.left, top + run.line * face.leading + face.size
            colour = who[run.place].colour(trace.info.num_layers)
            if colour is not None:
                high = 1.36 * face.size
                self.box(at, base - 1.02 * face.size, run.width, high, facecolor=colour, alpha=0.2)
                line = 0.09 * face.size
                self.box(at, base + high - 1.02 * face.size, run.width, line, facecolor=colour)
            said = run.text.lstrip(" ")
            if said:
                indent = width(run.text[: len(run.text) - len(said)])
                self.write(said, at + indent, base, face.size)

    def legend(self, trace: LayerTrace, left: float, base: float, size: float) -> None:
        """Who gave how many tokens."""
        width = _width(size)
        for giver, count in counted(givers(trace)):
            colour = giver.colour(trace.info.num_layers) or _OTHER
            self.box(left, base - 0.76 * size, 0.8 * size, 0.8 * size, facecolor=colour)
            words = f"{giver.words} {count}"
            self.write(words, left + 1.2 * size, base, size, color=_DIM)
            left += width(words) + 2.6 * size

    def keep(self, path: Path) -> None:
        """Raises CannotWrite."""
        with files.replacing(path) as new:
            self.figure.savefig(new, dpi=_DPI, metadata={"Software": "selfspec"})


def _width(size: float, weight: str = "normal") -> Width:
    """How wide a text is, spaces at its ends included."""
    renderer = RendererAgg(1, 1, _DPI)  # type: ignore[no-untyped-call]  # matplotlib's own
    font = FontProperties(family=families(), size=size, weight=weight)

    def ink(text: str) -> float:
        measure = renderer.get_text_width_height_descent
        return float(measure(text, font, ismath=False)[0])  # type: ignore[no-untyped-call]  # as above

    @cache
    def width(text: str) -> float:
        return ink(f"|{text}|") - ink("||")

    return width


def _shown(line: str) -> str:
    return drawable(visible(line).replace("␣", " ")) if line else ""


class Run(NamedTuple):
    """A token's text, or a part of it, on one line."""

    place: int
    """Of the token in the answer."""
    text: str
    line: int
    left: float
    width: float


_Part = tuple[int, str]
"""Of a token in the answer, and what it adds to a line."""


def flow(texts: Sequence[str], width: Width, room: float) -> list[Run]:
    """All texts on lines that are `room` wide.

    A line breaks where a word begins; a word that is longer than a line breaks between its tokens,
    a token that is longer within itself.
    """
    runs: list[Run] = []
    line, left = 0, 0.0
    for word in _words(texts):
        if word is None:
            line, left = line + 1, 0.0
            continue
        whole = sum(width(text) for _, text in word)
        if left and left + whole > room:
            line, left = line + 1, 0.0
            word = [(word[0][0], word[0][1].lstrip(" ")), *word[1:]]
        for place, text in _short(word, width, room):
            wide = width(text)
            if left and left + wide > room:
                line, left = line + 1, 0.0
            if text:
                runs.append(Run(place, text, line, left, wide))
            left += wide
    return runs


def _words(texts: Iterable[str]) -> Iterator[list[_Part] | None]:
    """Parts up to the next that begins with a space; None: the line ends."""
    word: list[_Part] = []
    for place, text in enumerate(texts):
        for number, piece in enumerate(text.split("\n")):
            if number:
                yield from ([word] if word else [])
                yield None
                word = []
            if piece.startswith(" ") and word:
                yield word
                word = []
            if piece:
                word.append((place, piece))
    if word:
        yield word


def _short(word: Iterable[_Part], width: Width, room: float) -> Iterator[_Part]:
    """None of them wider than a line."""
    for place, text in word:
        while len(text) > 1 and width(text) > room:
            fits = max(1, int(len(text) * room / width(text)) - 1)
            yield place, text[:fits]
            text = text[fits:]
        yield place, text


_WANTED = (
    "DejaVu Sans",  # comes with matplotlib
    "DejaVu Sans Mono",
    "Noto Sans Mono CJK SC",
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "WenQuanYi Zen Hei",
    "Noto Emoji",
    "Symbola",
)


@cache
def families() -> list[str]:
    """Those wanted families that are installed; matplotlib takes a glyph from the first with it."""
    installed = set(fontManager.get_font_names())
    return [name for name in _WANTED if name in installed]


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
