"""What the experiments share: the model with its drafter, first turns, figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from matplotlib.figure import Figure

import selfspec
from selfspec import files
from selfspec.eval.results import Question, load_suite, spread

DraftModel = Annotated[Path | None, typer.Option(help="Folder of a smaller model.")]
Values = Annotated[str, typer.Option(help="X[,X..].")]


def values(text: str) -> list[float]:
    """Of "0.2,0.5"."""
    return [float(word) for word in text.split(",")]


def load(
    draft_model: Path | None, dtype: str, *, max_tokens: int = 6, controller: str = "fixed"
) -> selfspec.Speculator:
    """The default model with a draft model, or without one with the heads that come with it.

    These are asked to draft whatever they think: how many is up to W_max and the controller.
    """
    options: dict[str, Any] = {"dtype": dtype, "never_slower": False, "controller": controller}
    if draft_model is not None:
        drafter = f"draft-model:max_tokens={max_tokens}"
        return selfspec.load(draft_model=draft_model, drafter=drafter, **options)
    return selfspec.load(drafter=f"ngram+exit:threshold=1e-6,max_tokens={max_tokens}", **options)


def first_turns(suite: str, questions: Path | None, limit: int, *tasks: str) -> list[Question]:
    """Questions of some tasks (all without a name), first turns only: later ones need answers.

    A reference is one for the last turn, so it goes where that is cut.
    """
    every = [q for q in load_suite(suite, questions) if not tasks or q.task in tasks]
    return [
        replace(q, turns=q.turns[:1], reference=q.reference if len(q.turns) == 1 else None)
        for q in spread(every, limit)
    ]


class Panel(NamedTuple):
    """Lines of a figure: places and values by name; `level`: a grey one across."""

    title: str
    along: str
    up: str
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]]
    level: float | None = None


def save(panels: Iterable[Panel], path: Path) -> None:
    """Panels in a row."""
    every = list(panels)
    figure = Figure(figsize=(4.6 * len(every), 3.6), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(every), squeeze=False)[0], every, strict=True):
        for name, (places, found) in panel.lines.items():
            style = "--" if name.endswith("formula") else "o-"
            axes.plot(places, found, style, markersize=3, label=name)
        if panel.level is not None:
            axes.axhline(panel.level, color="grey", linewidth=0.8)
        axes.set(title=panel.title, xlabel=panel.along, ylabel=panel.up)
        axes.legend(frameon=False, fontsize="small")
    with files.replacing(path) as new:
        figure.savefig(new, dpi=120, metadata={"Software": "selfspec"})
