"""Figures of a bench: its summary comes in, PNG files go out. Called by `report`.

For each figure three functions: `.._data` picks what was measured, `.._statistic` computes what is
shown, with its unit and the number of prompts behind it, `save_..` draws and does no arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from selfspec import files
from selfspec.decoding.stats import PARTS
from selfspec.eval.suites import OVERALL
from selfspec.eval.summary import ALL
from selfspec.eval.tables import shown
from selfspec.pages import palette

Summary = Mapping[str, Any]

BLUE = palette.RAMP[1]
INK, PALE = palette.TONES["ink"].light, palette.TONES["other"].light


class Gains(NamedTuple):
    """Speed-up of several methods."""

    unit: str
    """Of the speed-up."""
    prompts: int
    at: list[str]
    """Names of methods."""
    speed_up: list[float]
    low: list[float]
    """Ends of the 95 % intervals of the speed-up."""
    high: list[float]


class Profile(NamedTuple):
    """Where the time of several methods goes."""

    base: str
    """Whose whole time is 100 %."""
    answers: int
    names: list[str]
    percent: dict[str, list[float]]
    """By part of a round, in the order of the names."""


def methods_data(summary: Summary) -> list[tuple[str, Mapping[str, Any]]]:
    """The overall figures of all methods, without sweeps."""
    overall = summary[ALL].get(OVERALL, {})
    whole = [name for name, entry in summary["methods"].items() if name == entry["method"]]
    return [(shown(summary, name), overall[name]) for name in whole if name in overall]


def methods_statistic(points: Sequence[tuple[str, Mapping[str, Any]]], base: str) -> Gains:
    """In the given order; those without a speed-up are left out."""
    found = [(label, figures[f"over_{base}"]) for label, figures in points]
    gains = [(label, gain) for label, gain in found if gain]
    return Gains(
        f"× {base}",
        max((gain["prompts"] for _, gain in gains), default=0),
        [label for label, _ in gains],
        [gain["ratio"] for _, gain in gains],
        [gain["low"] for _, gain in gains],
        [gain["high"] for _, gain in gains],
    )


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
    axes.set_xlabel(f"speed-up [{gains.unit}]; n = {gains.prompts} prompts")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    _save(figure, path)


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


def _save(figure: Figure, path: Path) -> None:
    with files.replacing(path) as new:
        figure.savefig(new, dpi=120, metadata={"Software": "selfspec"})
