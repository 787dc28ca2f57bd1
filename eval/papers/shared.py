"""What the scripts of this folder share: the model, the results folder, tables, figures."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

import selfspec
from eval.called import command
from eval.papers import prices
from selfspec import files
from selfspec.api.speculator import Speculator
from selfspec.cli.env import machine
from selfspec.cli.progress import bar
from selfspec.errors import SelfspecError
from selfspec.eval import report
from selfspec.eval.results import Question, load_suite, spread
from selfspec.files import write as write_whole

STEP_COSTS = (4, 10)
"""c, plain steps of the large model to one of the draft model: "typically 4 to 10" (GammaTune,
section 3). Ours is measured; with these a result depends on counts alone."""

Lines = Mapping[str, tuple[Sequence[float], Sequence[float]]]
"""Of a figure: places and values by name."""


def load(
    draft_model: Path | None, dtype: str, *, max_tokens: int = 6, controller: str = "fixed"
) -> Speculator:
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


def progress(name: str, unit: str = "questions") -> AbstractContextManager[Any]:
    """A bar on standard error."""
    return bar(name, unit)


def begin(output: Path, speculator: Speculator | None) -> None:
    """Make the folder, or check that what it holds is a part of this very run.

    Raises InvalidOption where it is another run's.
    """
    facts: dict[str, Any] = {"run": {"command": command()}, "machine": machine()}
    if speculator is not None:
        facts["run"]["model"] = speculator.label
        facts["run"]["options"] = json.loads(json.dumps(speculator.options.described()))
    report.begin_results(output, facts, resume=True)


def priced(output: Path, speculator: Speculator, longest: int) -> prices.Prices:
    """Measured once for drafts up to `longest`, then kept in the folder."""
    path = output / "prices.json"
    if path.exists():
        kept = json.loads(path.read_text(encoding="utf-8"))
        return prices.Prices(verify=tuple(kept["verify"]), draft=kept["draft"])
    found = prices.measured(speculator, longest + 1)
    write_whole(path, json.dumps(asdict(found)) + "\n")
    return found


def finish(
    output: Path, note: str, summary: Mapping[str, Any], found: Sequence[report.Table]
) -> None:
    """Write `summary.json` and `table.md`, and print the latter."""
    facts = machine()
    place = ", ".join(f"{name} {facts[name]}" for name in ("cores", "threads", "cpu", "torch"))
    head = f"{note.strip()}\n\n    {command()}\n\nMachine: {facts['device']}, {place}.\n\n"
    text = head + "\n".join(report.markdown(table) for table in found)
    described = {"command": command(), "machine": facts, **summary}
    write_whole(output / "summary.json", json.dumps(described, indent=2) + "\n")
    write_whole(output / "table.md", text)
    print(text)


def panels(count: int) -> tuple[Figure, list[Axes]]:
    """An empty figure with so many panels in a row."""
    figure = Figure(figsize=(4.6 * count, 3.6), layout="constrained")
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


def draw(panel: Axes, lines: Lines, title: str, along: str, up: str) -> None:
    """Lines with their names."""
    for name, (places, values) in lines.items():
        panel.plot(places, values, "o-", markersize=3, label=name)
    panel.set(title=title, xlabel=along, ylabel=up)
    panel.legend(frameon=False, fontsize="small")


def save(figure: Figure, path: Path) -> None:
    """Under another name, then renamed."""
    with files.replacing(path) as new:
        figure.savefig(new, dpi=120, metadata={"Software": "selfspec"})


def one_line(run: Any) -> None:
    """Run a typer function; what a user can mend is one line, without a traceback."""
    import typer

    try:
        typer.run(run)
    except SelfspecError as error:
        sys.exit(str(error))
