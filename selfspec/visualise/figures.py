"""Figures over many answers: LayerTraces come in, PNG files go out.

For each figure three functions: `.._data` picks what was seen, `.._statistic` computes what is
shown, with its n, `save_..` draws and does no arithmetic. Called by `eval/visualise/figures.py`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure

from selfspec import files
from selfspec.api.givers import Giver
from selfspec.decoding.sources import MODEL
from selfspec.decoding.stats import GenerationStats
from selfspec.pages import palette
from selfspec.training.reliability import calibration_error
from selfspec.visualise.gain import givers, right_from
from selfspec.visualise.layers import LayerTrace

KINDS = ("word", "number", "punctuation", "special")

NEVER = None
"""In place of a layer: a sampled token that is not the model's likeliest saturates nowhere."""

_CONTROL = re.compile(r"<[^<>\s]+>|\s*")
"""Tokens like <|im_end|>, ends of lines and spaces."""

_GREY, _RED = (palette.TONES[name].light for name in ("other", "bad"))
_ORANGE, _BLUE = palette.SEEN, palette.RAMP[1]


class Shares(NamedTuple):
    """What became of the tokens of one kind."""

    kind: str
    tokens: int
    percent: dict[Giver, float]
    """By who gave them: exit layers, rising, other drafts, the model."""


class Saturation(NamedTuple):
    """From which layer on the guess is the final token, and stays it."""

    tokens: int
    layers: list[int]
    percent: list[float]
    """Of the tokens, by layer."""
    cumulative: list[float]
    """Percent up to each layer."""


class Agreement(NamedTuple):
    """One layer against the final tokens."""

    layer: int
    kind: str
    """Of its head."""
    tokens: int
    right: float
    """Percent of the tokens that are the layer's first guess."""
    sure: float
    """Mean probability of the first guess in percent, before annealing."""
    error: float
    """Expected calibration error in percent: how far the two are apart, bin by bin."""


class Kept(NamedTuple):
    """Drafts of one layer, or of one place in the draft."""

    at: str
    drafted: int
    percent: float
    """That stayed."""


def token_kind(text: str) -> str:
    """One of KINDS: special are control tokens, spaces, and parts of characters."""
    if _CONTROL.fullmatch(text) or "\N{REPLACEMENT CHARACTER}" in text:
        return "special"
    if any(character.isalpha() for character in text):
        return "word"
    return "number" if any(character.isnumeric() for character in text) else "punctuation"


# --- who gave tokens of each kind -----------------------------------------------------------------


def exits_data(traces: Iterable[LayerTrace]) -> list[tuple[str, Giver]]:
    """Of each token but the prompt's own, its kind and who gave it."""
    return [
        (token_kind(place.text), giver)
        for trace in traces
        for place, giver in zip(trace.places, givers(trace), strict=True)
        if place.kind != "prefill"
    ]


def exits_statistic(tokens: Sequence[tuple[str, Giver]]) -> list[Shares]:
    """By kind; those that do not occur are left out."""
    found = []
    drafts = sorted({giver for _, giver in tokens} - {Giver(MODEL)})
    for kind in KINDS:
        counts = Counter(giver for name, giver in tokens if name == kind)
        if total := counts.total():
            percent = {giver: 100 * counts[giver] / total for giver in (*drafts, Giver(MODEL))}
            found.append(Shares(kind, total, percent))
    return found


def save_exits(shares: Sequence[Shares], num_layers: int, path: Path) -> None:
    """A bar per kind, divided by who gave its tokens."""
    figure = Figure(figsize=(6.4, 0.6 + 0.5 * len(shares)), layout="constrained")
    axes = figure.subplots()
    labels = [f"{entry.kind}, n = {entry.tokens}" for entry in shares]
    left = [0.0] * len(shares)
    for giver in shares[0].percent:
        widths = [entry.percent[giver] for entry in shares]
        colour = giver.colour(num_layers) or _GREY
        axes.barh(labels, widths, left=left, height=0.66, label=giver.words, color=colour)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("tokens [%]")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    columns = len(shares[0].percent)
    figure.legend(loc="outside upper center", ncols=columns, frameon=False, fontsize="small")
    _save(figure, path)


# --- from which layer on the answer is known -----------------------------------------------------


def saturation_data(traces: Iterable[LayerTrace]) -> list[int | None]:
    """Of each token the first layer from which on every first guess is this token."""
    return [right_from(trace, place) for trace in traces for place in trace.places]


def saturation_statistic(layers: Sequence[int | None], shown: Sequence[int]) -> Saturation:
    """Over the layers `shown`, rising."""
    counts = Counter(layers)
    percent = [100 * counts[layer] / len(layers) for layer in shown]
    cumulative = [sum(percent[: n + 1]) for n in range(len(percent))]
    return Saturation(len(layers), list(shown), percent, cumulative)


def save_saturation(found: Saturation, path: Path) -> None:
    """Bars by layer, and a line for all up to it."""
    figure = Figure(figsize=(6.4, 3.0), layout="constrained")
    axes = figure.subplots()
    axes.bar(found.layers, found.percent, color=_BLUE, width=0.8, label="from this layer on")
    axes.plot(found.layers, found.cumulative, color=_ORANGE, label="from it or an earlier one")
    axes.set_ylim(0, 100)
    axes.set_ylabel("tokens [%]")
    axes.set_xlabel(f"layer from which on the first guess is the final token; n = {found.tokens}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize="small")
    _save(figure, path)


# --- how often layers are right, and whether they know it ----------------------------------------


def agreement_data(traces: Iterable[LayerTrace]) -> dict[int, list[tuple[float, bool]]]:
    """By layer, of each token: probability of the first guess, and whether it is right."""
    found: dict[int, list[tuple[float, bool]]] = {}
    for trace in traces:
        for place in trace.places:
            for said in place.layers:
                right = said.top_tokens[0] == place.token
                found.setdefault(said.layer, []).append((said.top_probs[0], right))
    return dict(sorted(found.items()))


def agreement_statistic(
    guesses: Mapping[int, Sequence[tuple[float, bool]]], kinds: Sequence[str]
) -> list[Agreement]:
    """One per layer, whose head is one of `kinds`."""
    found = []
    for (layer, pairs), kind in zip(guesses.items(), kinds, strict=True):
        sure = torch.tensor([prob for prob, _ in pairs], dtype=torch.float64)
        right = torch.tensor([agrees for _, agrees in pairs])
        found.append(
            Agreement(
                layer,
                kind,
                len(pairs),
                100 * right.double().mean().item(),
                100 * sure.mean().item(),
                100 * calibration_error(sure, right),
            )
        )
    return found


def save_agreement(found: Sequence[Agreement], path: Path) -> None:
    """Right and sure by layer in one panel, the calibration error in the other; a line a kind."""
    figure = Figure(figsize=(9.0, 3.0), layout="constrained")
    left, right = figure.subplots(1, 2)
    for kind, marker in zip(dict.fromkeys(entry.kind for entry in found), "osD^v", strict=False):
        entries = [entry for entry in found if entry.kind == kind]
        layers = [entry.layer for entry in entries]
        look: dict[str, Any] = {"marker": marker, "ms": 3.5, "lw": 1.2}
        left.plot(layers, [e.right for e in entries], color=_BLUE, label=f"{kind}: right", **look)
        left.plot(layers, [e.sure for e in entries], color=_ORANGE, label=f"{kind}: sure", **look)
        right.plot(layers, [e.error for e in entries], color=_RED, label=kind, **look)
    left.set_ylabel("first guess [%]")
    right.set_ylabel("calibration error [%]")
    for axes in (left, right):
        axes.legend(frameon=False, fontsize="x-small")
        axes.set_ylim(bottom=0)
        axes.set_xlabel(f"layer; n = {found[0].tokens} tokens")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.spines[["top", "right"]].set_visible(False)
    _save(figure, path)


# --- what verification keeps ---------------------------------------------------------------------


def acceptance_data(traces: Iterable[LayerTrace]) -> dict[str, dict[str, tuple[int, int]]]:
    """Drafted and accepted, `by_layer` (exit heads only) and `by_index` (counted from 1)."""
    stats = GenerationStats(num_layers=0)
    for trace in traces:
        for entry in trace.rounds:
            stats.add(entry)
    pairs = {
        "by_layer": (stats.drafted_by_layer, stats.accepted_by_layer),
        "by_index": (stats.drafted_by_index, stats.accepted_by_index),
    }
    return {
        name: {str(key): (count, accepted[key]) for key, count in sorted(drafted.items())}
        for name, (drafted, accepted) in pairs.items()
    }


def acceptance_statistic(counts: Mapping[str, tuple[int, int]]) -> list[Kept]:
    """From drafted and accepted."""
    return [
        Kept(at, drafted, 100 * accepted / drafted) for at, (drafted, accepted) in counts.items()
    ]


def save_acceptance(by_layer: Sequence[Kept], by_index: Sequence[Kept], path: Path) -> None:
    """Bars by draft index, and by exit layer where there are any."""
    panels = [(by_index, "place in the draft"), (by_layer, "exit layer")]
    drawn = [(bars, name) for bars, name in panels if bars]
    figure = Figure(figsize=(4.2 * len(drawn), 2.8), layout="constrained")
    for axes, (bars, name) in zip(
        figure.subplots(1, len(drawn), squeeze=False)[0], drawn, strict=True
    ):
        labels = [f"{bar.at}\n{bar.drafted}" for bar in bars]
        axes.bar(labels, [bar.percent for bar in bars], color=_BLUE, width=0.6)
        axes.set_xlim(-0.5, max(len(bars), 3) - 0.5)  # a single bar is no wall
        axes.set_ylim(0, 100)
        axes.set_xlabel(f"{name}; below it: drafts")
        axes.set_ylabel("drafts kept [%]")
        axes.spines[["top", "right"]].set_visible(False)
    _save(figure, path)


def save_all(traces: Sequence[LayerTrace], folder: Path) -> dict[str, object]:
    """All figures that the traces give; returns their statistics, ready for JSON.

    Without drafts there is no figure of acceptance. The traces must show the same layers.
    """
    info = traces[0].info
    exits = exits_statistic(exits_data(traces))
    layers = [*info.exit_layers, info.num_layers]
    saturated = saturation_statistic(saturation_data(traces), layers)
    agreed = agreement_statistic(agreement_data(traces), info.head_kinds)
    counts = acceptance_data(traces)
    save_exits(exits, info.num_layers, folder / "exits.png")
    save_saturation(saturated, folder / "saturation.png")
    save_agreement(agreed, folder / "agreement.png")
    by_layer, by_index = (acceptance_statistic(counts[f"by_{name}"]) for name in ("layer", "index"))
    if by_index:
        save_acceptance(by_layer, by_index, folder / "acceptance.png")
    return {
        "exits": [
            {**entry._asdict(), "percent": {who.words: n for who, n in entry.percent.items()}}
            for entry in exits
        ],
        "saturation": saturated._asdict(),
        "agreement": [entry._asdict() for entry in agreed],
        "acceptance": {
            "by_layer": [bar._asdict() for bar in by_layer],
            "by_index": [bar._asdict() for bar in by_index],
        },
    }


def _save(figure: Figure, path: Path) -> None:
    with files.replacing(path) as new:
        figure.savefig(new, dpi=130, metadata={"Software": "selfspec"})
