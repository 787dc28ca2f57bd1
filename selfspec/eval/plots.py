"""Figures of a bench: its summary comes in, PNG files go out. Called by `report`.

For each figure three functions: `.._data` picks what was measured, `.._statistic` computes what is
shown, with its unit and the number of prompts behind it, `save_..` draws and does no arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from selfspec import files
from selfspec.decoding.stats import PARTS
from selfspec.eval.suites import OVERALL
from selfspec.eval.summary import ALL
from selfspec.eval.tables import shown
from selfspec.pages import palette

Summary = Mapping[str, Any]

ABLATION = ("speculation", "no-annealing", "no-depth-bound", "no-width-bound")
SYMBOLS = {
    "exit.threshold": "exit threshold (tau)",
    "exit.anneal_strength": "anneal strength (alpha)",
    "exit.max_depth": "deepest exit layer (D_max)",
    "exit.max_tokens": "most drafts per round (W_max)",
}
BLUE, ORANGE = palette.RAMP[1], palette.SEEN
INK, PALE = palette.TONES["ink"].light, palette.TONES["other"].light


class Gains(NamedTuple):
    """Speed-up and compression of several settings or methods."""

    name: str
    """What is varied."""
    unit: str
    """Of the speed-up."""
    prompts: int
    at: list[Any]
    """The values, or the names of methods."""
    speed_up: list[float]
    low: list[float]
    """Ends of the 95 % intervals of the speed-up."""
    high: list[float]
    compression: list[float]
    """Tokens per verification."""


class Trade(NamedTuple):
    """What rounds save and what they cost; both in steps of plain decoding."""

    base: str
    answers: int
    """Behind each point."""
    names: list[str]
    saved: list[float]
    """Tokens per verification beyond the one that a plain step gives."""
    cost: list[float]
    """Time of a round beyond one plain step: drafting, heads, further rows."""


class Shares(NamedTuple):
    """Acceptance of one method by exit layer or draft index."""

    name: str
    drafted: int
    """Drafts behind it."""
    at: list[int]
    percent: list[float]


class Profile(NamedTuple):
    """Where the time of several methods goes."""

    base: str
    """Whose whole time is 100 %."""
    answers: int
    names: list[str]
    percent: dict[str, list[float]]
    """By part of a round, in the order of the names."""


# --- speed-up and compression against one option: SpecBound's Figure 3 ---------------------------


def sweep_data(summary: Summary) -> dict[str, list[tuple[Any, Mapping[str, Any]]]]:
    """By option the values that were tried, each with its overall figures."""
    found: dict[str, list[tuple[Any, Mapping[str, Any]]]] = {}
    overall = summary[ALL].get(OVERALL, {})
    for label, described in summary["methods"].items():
        for option, value in described.get("swept", {}).items() if label in overall else ():
            found.setdefault(option, []).append((value, overall[label]))
    return found


def sweep_statistic(
    option: str, points: Sequence[tuple[Any, Mapping[str, Any]]], base: str
) -> Gains:
    """Points in rising order of the value; those without a speed-up are left out."""
    measured = [(value, found) for value, found in points if found[f"over_{base}"]]
    return _gains(SYMBOLS.get(option, option), sorted(measured, key=lambda p: p[0]), base)


def save_sweeps(sweeps: Sequence[Gains], path: Path) -> None:
    """One panel per option: speed-up with its interval in blue, compression in orange."""
    figure = Figure(figsize=(4.6 * len(sweeps), 3.2), layout="constrained")
    for axes, sweep in zip(figure.subplots(1, len(sweeps), squeeze=False)[0], sweeps, strict=True):
        axes.plot(sweep.at, sweep.speed_up, marker="o", color=BLUE)
        axes.vlines(sweep.at, sweep.low, sweep.high, color=BLUE, alpha=0.4)
        axes.set_xticks(sweep.at)
        axes.set_xlabel(f"{sweep.name}; n = {sweep.prompts} prompts")
        axes.set_ylabel(f"speed-up [{sweep.unit}]", color=BLUE)
        other = axes.twinx()
        other.plot(sweep.at, sweep.compression, marker="s", color=ORANGE)
        other.set_ylabel("tokens per verification", color=ORANGE)
    _save(figure, path)


# --- methods side by side, and what the components give: SpecBound's Figure 4 --------------------


def methods_data(summary: Summary, names: Sequence[str]) -> list[tuple[Any, Mapping[str, Any]]]:
    """The overall figures of those of the methods `names` that were measured."""
    overall = summary[ALL].get(OVERALL, {})
    return [(shown(summary, name), overall[name]) for name in names if name in overall]


def methods_statistic(
    name: str, points: Sequence[tuple[Any, Mapping[str, Any]]], base: str
) -> Gains:
    """In the given order; those without a speed-up are left out."""
    return _gains(name, [(label, found) for label, found in points if found[f"over_{base}"]], base)


def save_methods(gains: Gains, path: Path) -> None:
    """One bar per method, with its interval; the fastest stands out."""
    figure = Figure(figsize=(8.0, 0.9 + 0.42 * len(gains.at)), layout="constrained")
    axes = figure.subplots()
    best = max(gains.speed_up)
    colours = [BLUE if value == best else PALE for value in gains.speed_up]
    rows = range(len(gains.at))
    axes.barh(rows, gains.speed_up, color=colours, height=0.66, tick_label=gains.at)
    axes.hlines(rows, gains.low, gains.high, color=INK, linewidth=1.2)
    for row, value, high in zip(rows, gains.speed_up, gains.high, strict=True):
        axes.annotate(f"{value:.2f}", (high, row), (6, 0), textcoords="offset points", va="center")
    axes.axvline(1.0, color=INK, linewidth=0.8)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"speed-up [{gains.unit}]; {gains.name}, n = {gains.prompts} prompts")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    _save(figure, path)


# --- tokens saved against cost -------------------------------------------------------------------


def trade_data(summary: Summary) -> list[tuple[str, float, float]]:
    """Label, tokens per verification and seconds per token behind the first, of each method."""
    overall = summary[ALL].get(OVERALL, {})
    return [
        (shown(summary, label), overall[label]["compression_rate"], found["token_mean_s"])
        for label, found in summary["latency"].items()
        if found and overall[label]["compression_rate"] > 0.0
    ]


def trade_statistic(points: Sequence[tuple[str, float, float]], base: str, answers: int) -> Trade:
    """All methods but the `base`, whose seconds per token are those of a step.

    A round takes its tokens times the seconds of each. Where it saves more than it costs, decoding
    is faster than plain decoding, the prompt's pass left aside. No points without the base.
    """
    step = sum(rate * seconds for label, rate, seconds in points if label == base)
    others = [point for point in points if point[0] != base and step]
    return Trade(
        base,
        answers,
        [label for label, _, _ in others],
        [rate - 1.0 for _, rate, _ in others],
        [rate * seconds / step - 1.0 for _, rate, seconds in others],
    )


def save_trade(trade: Trade, path: Path) -> None:
    """One point per method; above the line it pays."""
    figure = Figure(figsize=(6.0, 4.4), layout="constrained")
    axes = figure.subplots()
    for name, cost, saved in zip(trade.names, trade.cost, trade.saved, strict=True):
        axes.plot(cost, saved, marker="o", linestyle="none", label=name)
    axes.axline((0.0, 0.0), slope=1.0, color="grey", linewidth=0.8)
    axes.set_xlabel(f"cost per round [steps of {trade.base}]; n = {trade.answers} answers")
    axes.set_ylabel("tokens saved per round")
    _legend(axes)
    _save(figure, path)


# --- where the time goes -------------------------------------------------------------------------


def profile_data(summary: Summary) -> dict[str, Mapping[str, float]]:
    """Seconds by part of each method on our runtime, without sweeps."""
    return {
        shown(summary, label): found
        for label, found in summary["parts_s"].items()
        if found and label == summary["methods"][label]["method"]
    }


def profile_statistic(
    seconds: Mapping[str, Mapping[str, float]], base: str, answers: int
) -> Profile | None:
    """In percent of the whole time of `base`; None without it."""
    whole = sum(seconds.get(base, {}).values())
    if not whole:
        return None
    percent = {
        part: [100 * found.get(part, 0.0) / whole for found in seconds.values()] for part in PARTS
    }
    return Profile(base, answers, list(seconds), percent)


def save_profile(profile: Profile, path: Path) -> None:
    """One bar per method, its parts end to end."""
    figure = Figure(figsize=(8.0, 1.2 + 0.4 * len(profile.names)), layout="constrained")
    axes = figure.subplots()
    ends = [0.0] * len(profile.names)
    for part, percent in profile.percent.items():
        axes.barh(profile.names, percent, left=ends, label=part)
        ends = [end + width for end, width in zip(ends, percent, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel(f"time [% of {profile.base}]; n = {profile.answers} answers")
    axes.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    _save(figure, path)


# --- acceptance ----------------------------------------------------------------------------------


def acceptance_data(summary: Summary, kind: str) -> dict[str, dict[str, Sequence[int]]]:
    """Drafted and accepted of each method that drafted, without sweeps; `kind` layer or index."""
    return {
        shown(summary, label): summary["acceptance"][label][f"by_{kind}"]
        for label, described in summary["methods"].items()
        if label == described["method"] and summary["acceptance"][label][f"by_{kind}"]
    }


def acceptance_statistic(counts: Mapping[str, Mapping[str, Sequence[int]]]) -> list[Shares]:
    """Percent of the drafts of each method that stay."""
    return [
        Shares(
            label,
            sum(drafted for drafted, _ in pairs.values()),
            [int(key) for key in pairs],
            [100 * accepted / drafted for drafted, accepted in pairs.values()],
        )
        for label, pairs in counts.items()
    ]


def save_acceptance(by_layer: Sequence[Shares], by_index: Sequence[Shares], path: Path) -> None:
    """Two panels, one line per method."""
    figure = Figure(figsize=(9.0, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, shares, name in ((left, by_layer, "exit layer"), (right, by_index, "draft index")):
        for line in shares:
            axes.plot(line.at, line.percent, marker="o", label=f"{line.name}, n = {line.drafted}")
        axes.set_xlabel(name)
        axes.xaxis.get_major_locator().set_params(integer=True)
    left.set_ylabel("accepted drafts [%]")
    _legend(left)
    _save(figure, path)


def _gains(name: str, points: Sequence[tuple[Any, Mapping[str, Any]]], base: str) -> Gains:
    speed_ups = [found[f"over_{base}"] for _, found in points]
    return Gains(
        name,
        f"× {base}",
        max((gain["prompts"] for gain in speed_ups), default=0),
        ["/".join(map(str, v)) if isinstance(v, list) else v for v, _ in points],
        [gain["ratio"] for gain in speed_ups],
        [gain["low"] for gain in speed_ups],
        [gain["high"] for gain in speed_ups],
        [found["compression_rate"] for _, found in points],
    )


def _legend(axes: Axes) -> None:
    axes.legend(frameon=False, fontsize="small")


def _save(figure: Figure, path: Path) -> None:
    with files.replacing(path) as new:
        figure.savefig(new, dpi=120, metadata={"Software": "selfspec"})
