"""Points of the dialled-in regime as a table and a figure; no arithmetic but ratios of columns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eval.dialled.runs import Point
from selfspec import files

NOTE = """\
Synthetic: a model that answers early by construction, and a head that is wrong where it is told to
be. This shows what the runtime does where heads are good, not how good heads are. D / L: depth of
the exit; k: drafts per round; a: chance that a draft is kept when those before it are. Speed-up
over plain decoding on the same runtime, after the prompt's pass. The formula is SpecBound's, at the
a that was measured: heads cost nothing, and no row is run for the token behind the last draft. The
complete formula has both, so what is missing to 100 % there are rows that are not free, and
bookkeeping.
"""

_COLUMNS = (
    "D / L",
    "k",
    "a",
    "CR",
    "measured",
    "formula",
    "measured / formula",
    "heads' time off",
    "that / formula",
    "complete formula",
    "measured / complete",
    "texts of plain decoding",
)


def markdown(points: Sequence[Point]) -> str:
    """The table under its note."""
    lines = [
        NOTE,
        "| " + " | ".join(_COLUMNS) + " |",
        "|---" * len(_COLUMNS) + "|",
        *(f"| {' | '.join(_cells(point))} |" for point in points),
    ]
    return "\n".join(lines) + "\n"


def save_figure(points: Sequence[Point], path: Path) -> None:
    """Speed-up by acceptance, one panel per depth, one colour per draft length."""
    from matplotlib.figure import Figure

    ratios = sorted({point.dial.depth_ratio for point in points})
    widths = sorted({point.dial.max_draft_tokens for point in points})
    figure = Figure(figsize=(4 * len(ratios) + 2, 3.6), layout="constrained")
    panels = figure.subplots(1, len(ratios), squeeze=False, sharey=True)[0]
    for panel, ratio in zip(panels, ratios, strict=True):
        for index, width in enumerate(widths):
            here = _chosen(points, ratio, width)
            rates = [point.acceptance for point in here]
            colour = f"C{index}"
            panel.plot(rates, [p.speed_up for p in here], "o-", color=colour, label=f"k = {width}")
            panel.plot(rates, [p.formula for p in here], "--", color=colour)
            panel.plot(rates, [p.complete_formula for p in here], ":", color=colour)
        panel.set(title=f"exit at {ratio:.0%} of the layers", xlabel="acceptance a")
        panel.axhline(1.0, color="grey", linewidth=0.8)
    for style, label in (("o-", "measured"), ("--", "formula"), (":", "complete formula")):
        panels[0].plot([], [], style, color="grey", label=label)
    panels[0].set_ylabel("speed-up over plain decoding")
    figure.legend(loc="outside right center", frameon=False)
    figure.suptitle("Synthetic early model")
    with files.replacing(path) as new:
        figure.savefig(new, dpi=120, metadata={"Software": "selfspec"})


def _chosen(points: Sequence[Point], ratio: float, width: int) -> list[Point]:
    """One line of the figure, by acceptance."""
    found = [
        point
        for point in points
        if (point.dial.depth_ratio, point.dial.max_draft_tokens) == (ratio, width)
    ]
    return sorted(found, key=lambda point: point.acceptance)


def _cells(point: Point) -> list[str]:
    return [
        f"{point.dial.depth_ratio:.2f}",
        f"{point.dial.max_draft_tokens}",
        f"{point.acceptance:.1%}",
        f"{point.compression_rate:.2f}",
        f"{point.speed_up:.2f}×",
        f"{point.formula:.2f}×",
        f"{point.speed_up / point.formula:.0%}",
        f"{point.speed_up_without_heads:.2f}×",
        f"{point.speed_up_without_heads / point.formula:.0%}",
        f"{point.complete_formula:.2f}×",
        f"{point.speed_up / point.complete_formula:.0%}",
        f"{point.equal_texts} of {point.prompts}",
    ]
