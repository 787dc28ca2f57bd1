"""Tokens by layers as a picture: what each layer would have said, how sure, right or wrong.

A LayerTrace comes in, PNG or SVG files go out; a long answer takes several pages. In an SVG every
cell's id carries its numbers. Called by `selfspec trace` and the scripts of `eval/visualise`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from selfspec import files
from selfspec.visualise.fonts import drawable, families, fitting
from selfspec.visualise.layers import LayerTrace, Place
from selfspec.visualise.texts import PART_OF_CHARACTER, visible

TOKENS_A_PAGE = 20
_CELL = (0.62, 0.2)
"""Width and height in inches."""
_FEWEST = 12
"""Columns of a page at least: the legend needs the room."""
_MARGINS = (0.75, 0.2, 0.8, 0.62)
"""Left, right, above, below, in inches."""
_MOST = 9
"""Columns of text in a cell."""

_SHADES = LinearSegmentedColormap.from_list("sure", ["#f7f9fc", "#bcd4ea", "#5b9bd0", "#1d5fa3"])
_INK, _FAINT, _PALE = "#10202f", "#66788a", "#c3ccd5"
_INKS = {
    (True, False): _INK,
    (True, True): "white",
    (False, False): "#44586b",
    (False, True): "#d5e3f1",
}
"""Of text, by whether it is right and whether it stands on a dark shade."""
_DARK = 0.6
"""A shade is dark from this confidence on."""
_EXITED: dict[str, Any] = {"fill": False, "edgecolor": "#f2a900", "linewidth": 1.9}
_WRONG: dict[str, Any] = {"fill": False, "edgecolor": "#d7263d", "linewidth": 1.2}
_SMALL: dict[str, Any] = {"fontsize": 7, "color": _FAINT}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One layer's guess at one place, as it is drawn."""

    index: int
    """Of the place."""
    layer: int
    text: str
    confidence: float
    """After annealing; of the last layer, the model's own probability."""
    right: bool
    """The guess is the final token."""
    wrong: bool
    """Not right, but confident: at its threshold or above."""
    exited: bool
    """An accepted draft left here."""

    @property
    def id(self) -> str:
        """For the SVG: everything that decides how the cell looks."""
        marks = ("right", self.right), ("wrong", self.wrong), ("exit", self.exited)
        named = "-".join(name for name, holds in marks if holds)
        return f"p{self.index}-l{self.layer}-c{self.confidence:.6f}" + (named and f"-{named}")


def cells(trace: LayerTrace, place: Place) -> list[Cell]:
    """A column: all layers that were looked at, the last layer of the model on top."""
    found = [
        Cell(
            index=place.index,
            layer=said.layer,
            text=said.top_texts[0],
            confidence=said.confidence,
            right=said.top_tokens[0] == place.token,
            wrong=said.top_tokens[0] != place.token and said.confidence >= threshold,
            exited=said.layer == place.exit_layer,
        )
        for said, threshold in zip(place.layers, trace.info.thresholds, strict=True)
    ]
    last = Cell(
        index=place.index,
        layer=trace.info.num_layers,
        text=place.final_top_texts[0],
        confidence=place.final_top_probs[0],
        right=place.final_top_tokens[0] == place.token,
        wrong=False,
        exited=False,
    )
    return [*found, last]


def pages(tokens: int, path: Path, tokens_a_page: int = TOKENS_A_PAGE) -> list[Path]:
    """The files that `save` will write: `path`, or path-1, path-2, .. for a long answer."""
    count = -(-tokens // tokens_a_page)
    if count <= 1:
        return [path]
    return [path.with_stem(f"{path.stem}-{number}") for number in range(1, count + 1)]


def possible_pages(path: Path, most_tokens: int) -> list[Path]:
    """All files that `save` may write for an answer of so many tokens."""
    return [path, *pages(most_tokens, path)]


def save(trace: LayerTrace, path: Path, tokens_a_page: int = TOKENS_A_PAGE) -> list[Path]:
    """Draw all pages, as PNG or SVG by the path's suffix; returns the files. Raises CannotWrite."""
    made = pages(len(trace.places), path, tokens_a_page)
    style: dict[Any, Any] = {
        "svg.fonttype": "none",  # text stays text: it can be searched, and read back by tests
        "svg.hashsalt": "selfspec",  # the same picture gives the same file
        "font.family": families("DejaVu Sans"),
    }
    with mpl.rc_context(style):
        for number, file in enumerate(made):
            shown = trace.places[number * tokens_a_page : (number + 1) * tokens_a_page]
            figure = _draw(trace, shown)
            svg = file.suffix == ".svg"
            by = {"Creator": "selfspec", "Date": None} if svg else {"Software": "selfspec"}
            with files.replacing(file) as new:
                figure.savefig(new, dpi=130, metadata=by)
    return made


def _draw(trace: LayerTrace, places: Sequence[Place]) -> Figure:
    """One page."""
    rows = len(trace.info.exit_layers) + 1
    columns = max(len(places), _FEWEST)
    left, right, above, below = _MARGINS
    inner = columns * _CELL[0], rows * _CELL[1]
    width, height = left + inner[0] + right, above + inner[1] + below
    figure = Figure(figsize=(width, height), facecolor="white")
    axes = figure.add_axes(
        (left / width, below / height, inner[0] / width, inner[1] / height),
        xlim=(0, columns),
        ylim=(0, rows),
    )
    axes.spines[:].set_visible(False)
    for column, place in enumerate(places):
        for row, cell in enumerate(cells(trace, place)):
            _draw_cell(axes, column, row, cell)
    _draw_layers(axes, trace)
    _draw_tokens(axes, places)
    _draw_rounds(axes, places)
    _draw_title(figure, trace, places)
    _draw_legend(figure)
    return figure


def _draw_cell(axes: Axes, column: int, row: int, cell: Cell) -> None:
    """Shade, text, and a frame where the guess was wrong or taken."""
    box = Rectangle((column, row), 1, 1, facecolor=_SHADES(cell.confidence), edgecolor="white")
    box.set_gid(cell.id)
    axes.add_patch(box)
    if cell.wrong or cell.exited:
        look = _EXITED if cell.exited else _WRONG
        frame = Rectangle((column + 0.03, row + 0.08), 0.94, 0.84, zorder=3, **look)
        frame.set_gid(f"frame-{cell.id}")
        axes.add_patch(frame)
    bright = cell.confidence >= _DARK
    text = axes.text(
        column + 0.5,
        row + 0.47,
        _label(cell.text),
        ha="center",
        va="center",
        fontsize=6.6,
        family=families(),
        fontweight="bold" if cell.right else "normal",
        color=_INKS[cell.right, bright],
        parse_math=False,
        zorder=4,
    )
    text.set_gid(f"text-{cell.id}")


def _draw_layers(axes: Axes, trace: LayerTrace) -> None:
    """What each row is; layers whose head was in use are bold."""
    info = trace.info
    names = [str(layer) if layer else "embedding" for layer in (*info.exit_layers, info.num_layers)]
    axes.set_yticks([row + 0.5 for row in range(len(names))], names)
    axes.tick_params(axis="both", length=0, labelsize=7, pad=3)
    used = [layer in info.settings.exit_layers for layer in info.exit_layers]
    for tick, bold in zip(axes.get_yticklabels(), [*used, False], strict=True):
        tick.set(fontweight="bold" if bold else "normal", color=_INK if bold else _FAINT)
    beside = axes.get_yaxis_transform()
    pad = -0.04 / _CELL[0] / axes.get_xlim()[1]
    axes.text(pad, len(names) + 0.4, "layer", transform=beside, ha="right", **_SMALL)


def _draw_tokens(axes: Axes, places: Sequence[Place]) -> None:
    """The emitted tokens, above; their numbers, below."""
    columns = [column + 0.5 for column in range(len(places))]
    axes.set_xticks(columns, [str(place.index) for place in places])
    axes.tick_params(axis="x", labelsize=6, labelcolor=_FAINT, pad=1)
    for column, place in zip(columns, places, strict=True):
        text = axes.text(
            column,
            axes.get_ylim()[1] + 0.3,
            _label(place.text or PART_OF_CHARACTER),
            ha="center",
            fontsize=7.4,
            family=families(),
            fontweight="bold",
            color=_INK,
            parse_math=False,
        )
        text.set_gid(f"token-{place.index}")


def _draw_rounds(axes: Axes, places: Sequence[Place]) -> None:
    """A bar below the tokens of each round, open where the page cuts one."""
    low = -0.2 / _CELL[1]
    start = 0
    for number, entry in itertools.groupby(places, key=lambda place: place.round):
        count = len(list(entry))
        ends = [start + 0.06, start + count - 0.06]
        bar = Line2D(ends, [low, low], color=_INK if count > 1 else _PALE, clip_on=False)
        bar.set(linewidth=2.2, solid_capstyle="butt", gid=f"round-{number}")
        axes.add_line(bar)
        start += count
    beside = axes.get_yaxis_transform()
    pad = -0.04 / _CELL[0] / axes.get_xlim()[1]
    axes.text(pad, low, "rounds", transform=beside, ha="right", va="center", **_SMALL)


def _draw_title(figure: Figure, trace: LayerTrace, places: Sequence[Place]) -> None:
    """What was asked of which model, and which part of the answer this is."""
    width, height = figure.get_size_inches()
    left = _MARGINS[0] / width
    asked = fitting(drawable(visible(trace.info.prompt).replace("␣", " ")), int(width * 10))
    figure.text(left, 1 - 0.28 / height, asked, fontsize=9, color=_INK, parse_math=False)
    settings = trace.info.settings
    model = drawable(visible(trace.info.base_model).replace("␣", " "))
    part = f"tokens {places[0].index} to {places[-1].index} of {len(trace.places)}"
    used = zip(settings.exit_layers, settings.exit_thresholds, strict=True)
    taus = "".join(f", leaves layer {layer} from {tau:g} on" for layer, tau in used)
    words = f"{model}, drafter {settings.drafter}{taus}; {part}"
    figure.text(left, 1 - 0.47 / height, words, parse_math=False, **_SMALL)


def _draw_legend(figure: Figure) -> None:
    """What shades, frames and bars mean."""
    width, height = figure.get_size_inches()
    signs = [
        Patch(**_EXITED, label="left here, as a draft that stayed"),
        Patch(**_WRONG, label="sure enough to leave, and wrong"),
    ]
    figure.legend(
        handles=signs,
        loc="lower left",
        bbox_to_anchor=((_MARGINS[0] - 0.1) / width, 0.0),
        ncols=2,
        frameon=False,
        fontsize=7,
        labelcolor=_INK,
        handlelength=1.6,
        columnspacing=1.2,
    )
    scale = figure.add_axes(
        ((width - _MARGINS[1] - 1.0) / width, 0.13 / height, 1.0 / width, 0.09 / height)
    )
    figure.colorbar(ScalarMappable(Normalize(0, 1), _SHADES), scale, orientation="horizontal")
    scale.set_xticks([])
    scale.spines[:].set_visible(False)
    beside = {"va": "center", "transform": scale.transAxes, **_SMALL}
    scale.text(-0.03, 0.4, "bold: right    confidence 0", ha="right", **beside)
    scale.text(1.03, 0.4, "1", ha="left", **beside)


def _label(text: str) -> str:
    return fitting(drawable(visible(text)), _MOST)
