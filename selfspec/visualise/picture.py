"""An answer as a picture: its text in the colours of who gave it, with a bar of depth per token.

A LayerTrace comes in, one PNG or SVG file of any length goes out, or a card to share: the answer in
large type beside one number. Called by `selfspec trace`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.backends.backend_agg import RendererAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import Circle, Rectangle

from selfspec import files
from selfspec.decoding.prices import Costs
from selfspec.pages import palette
from selfspec.visualise.flow import Run, Width, flow
from selfspec.visualise.fonts import drawable, families, fitting
from selfspec.visualise.gain import counted, gain, givers, head_right, right_from
from selfspec.visualise.layers import LayerTrace
from selfspec.visualise.texts import visible

WIDE, CARD = 1200, (1200, 675)
"""Pixels, before `_SHARPER`."""

_SHARPER, _MOST = 1.5, 60_000
"""How much finer a picture is than it is laid out, and the most pixels that matplotlib draws."""

_MARGIN = 48
_BAR, _STEM = 22, 4
"""The highest bar, and its width."""

_INK, _DIM, _PAPER, _OTHER = (palette.TONES[n].light for n in ("ink", "dim", "card", "other"))


class _Face(NamedTuple):
    """How the text of an answer is set."""

    size: float
    leading: float
    """From line to line."""


_TEXT = _Face(19, 64)
_CARD_FACES = tuple(_Face(size, 1.62 * size) for size in (40, 36, 32, 29, 26))
"""The largest that fits is taken; with the smallest the answer is cut."""


def save(trace: LayerTrace, path: Path, costs: Costs | None = None) -> None:
    """The whole answer, as PNG or SVG by the path's suffix. Raises CannotWrite."""
    with _style():
        runs = flow(_texts(trace), _width(_TEXT.size), WIDE - 2 * _MARGIN)
        top = 164
        end = top + (1 + max((run.line for run in runs), default=0)) * _TEXT.leading
        sheet = _Sheet(WIDE, end + 92)
        headline = gain(trace, costs).headline
        size = min(30, 30 * (WIDE - 2 * _MARGIN) / _width(30, "bold")(drawable(headline)))
        sheet.write(headline, _MARGIN, 66, size, weight="bold")
        sheet.write(_asked(trace), _MARGIN, 104, 17)
        sheet.write(_described(trace), _MARGIN, 132, 14, color=_DIM)
        sheet.bars(trace, runs, top, _MARGIN)
        sheet.answer(trace, runs, _MARGIN, top + _BAR + 6, _TEXT)
        sheet.legend(trace, _MARGIN, end + 30, 16)
        words = "bar: from this layer on every guess is the token; dot: a fitted head says it here"
        sheet.write(words, _MARGIN, end + 60, 14, color=_DIM)
        sheet.keep(path, min(_SHARPER, _MOST / (end + 92)))


def save_card(trace: LayerTrace, path: Path, costs: Costs | None = None) -> None:
    """1200 x 675 pixels, PNG. Raises CannotWrite."""
    found, left, (width, height) = gain(trace, costs), 388, CARD
    with _style():
        face, runs = _fitting(_texts(trace), width - left - 48, height - 118)
        sheet = _Sheet(width, height)
        sheet.box(0, 0, 340, height, facecolor=palette.TONES["quiet"].light)
        sheet.write(f"{found.drafted / found.tokens:.0%}", 40, 206, 104, weight="bold")
        sheet.write("of this answer", 46, 262, 27)
        sheet.write(found.came, 46, 300, 27)
        sheet.write(found.rate, 46, 344, 20, color=_DIM)
        if found.verdict:
            sheet.write(f"drafts {found.verdict}", 46, 374, 16, color=_DIM)
        sheet.write("selfspec", 46, height - 60, 26, weight="bold")
        sheet.write(fitting(_name(trace), 34), 46, height - 34, 14, color=_DIM)
        sheet.answer(trace, runs, left, 44, face)
        sheet.legend(trace, left, height - 34, 16)
        sheet.keep(path, 1)


_DPI = 72
"""A point is a pixel."""


def _fitting(texts: Sequence[str], room: float, height: float) -> tuple[_Face, list[Run]]:
    """The largest face in which the answer fits; what does not fit is left out, with a sign."""
    for face in _CARD_FACES:
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

    def bars(self, trace: LayerTrace, runs: Sequence[Run], top: float, left: float) -> None:
        """Over the first part of each token, from which layer on guesses stay right."""
        total, drawn = trace.info.num_layers, set[int]()
        for run in runs:
            layer = right_from(trace, trace.places[run.place])
            if layer is None or run.place in drawn:
                continue
            drawn.add(run.place)
            at = left + run.left + (run.width - _STEM) / 2
            foot = top + run.line * _TEXT.leading + _BAR
            high = max(2.0, _BAR * layer / total)
            self.box(at, foot - _BAR, _STEM, _BAR, facecolor=_OTHER, alpha=0.35)
            self.box(at, foot - high, _STEM, high, facecolor=palette.of_layer(layer, total))
            head = head_right(trace, trace.places[run.place])
            if head is not None:
                middle = at + _STEM / 2, foot - _BAR * head / total
                self._axes.add_patch(Circle(middle, 4, facecolor=_PAPER, edgecolor=_INK, lw=1.6))

    def legend(self, trace: LayerTrace, left: float, base: float, size: float) -> None:
        """Who gave how many tokens."""
        width = _width(size)
        for giver, count in counted(givers(trace)):
            colour = giver.colour(trace.info.num_layers) or _OTHER
            self.box(left, base - 0.76 * size, 0.8 * size, 0.8 * size, facecolor=colour)
            words = f"{giver.words} {count}"
            self.write(words, left + 1.2 * size, base, size, color=_DIM)
            left += width(words) + 2.6 * size

    def keep(self, path: Path, scale: float) -> None:
        """Raises CannotWrite."""
        by = {"Creator": "selfspec", "Date": None} if path.suffix == ".svg" else {}
        with files.replacing(path) as new:
            self.figure.savefig(new, dpi=_DPI * scale, metadata=by or {"Software": "selfspec"})


def _style() -> Any:
    """The same picture gives the same file, and looks the same everywhere."""
    look = {
        "svg.fonttype": "path",
        "svg.hashsalt": "selfspec",
        "font.family": families("DejaVu Sans"),
        "text.hinting": "none",
    }
    return mpl.rc_context(look)  # type: ignore[arg-type]  # its keys are literals


def _width(size: float, weight: str = "normal") -> Width:
    """How wide a text is, spaces at its ends included."""
    renderer = RendererAgg(1, 1, _DPI)  # type: ignore[no-untyped-call]  # matplotlib's own
    font = FontProperties(family=families("DejaVu Sans"), size=size, weight=weight)

    def ink(text: str) -> float:
        measure = renderer.get_text_width_height_descent
        return float(measure(text, font, ismath=False)[0])  # type: ignore[no-untyped-call]  # as above

    @cache
    def width(text: str) -> float:
        return ink(f"|{text}|") - ink("||")

    return width


def _texts(trace: LayerTrace) -> list[str]:
    """Of all tokens, as they are drawn; ends of lines stay."""
    return ["\n".join(drawable(_shown(line)) for line in text.split("\n")) for text in trace.answer]


def _shown(line: str) -> str:
    return visible(line).replace("␣", " ") if line else ""


def _name(trace: LayerTrace) -> str:
    return _shown(trace.info.base_model)


def _asked(trace: LayerTrace) -> str:
    return fitting(" ".join(_shown(trace.info.prompt.replace("\n", " ")).split()), 110)


def _described(trace: LayerTrace) -> str:
    """What answered, how."""
    drafts = sum(len(entry.draft_tokens) for entry in trace.rounds)
    words = f"{_name(trace)}, drafter {trace.info.settings.drafter}, {len(trace.places)} tokens"
    return f"{words}, {drafts} drafts" + ("" if trace.info.settings.lossless else ", lossy")
