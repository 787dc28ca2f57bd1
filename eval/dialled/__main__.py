"""The regime of large models, dialled in: measured speed-up beside SpecBound's formula.

    python -m eval.dialled --output eval/results/dialled

Makes a model that answers early from the default one, turns acceptance, depth and draft length, and
times plain decoding and speculation in turns. Nothing else should run on the machine. Writes
`run.yaml`, `runs.jsonl`, `summary.json`, `table.md` and `dialled.png`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
import yaml
from rich.console import Console
from rich.progress import track

import selfspec
from eval.dialled import runs as dialled
from eval.dialled.report import markdown, save_figure
from selfspec.cli.env import machine
from selfspec.eval.results import SIX_TASKS, load_suite
from selfspec.files import write

BUILT_IN = dialled.Sweep()


def joined(values: Iterable[float]) -> str:
    """As a flag has it."""
    return ",".join(f"{value:g}" for value in values)


def main(
    output: Annotated[Path, typer.Option(help="Results folder.")],
    model: str | None = None,
    dtype: str = "bfloat16",
    layers: Annotated[int, typer.Option(help="Layers ahead of the exit.")] = BUILT_IN.layers,
    extra_layers: Annotated[str, typer.Option(help="Layers behind it: N[,N..].")] = joined(
        BUILT_IN.extra_layers
    ),
    max_draft_tokens: Annotated[str, typer.Option(help="Drafts per round: N[,N..].")] = joined(
        BUILT_IN.max_draft_tokens
    ),
    wrong_shares: Annotated[str, typer.Option(help="Wrong drafts: X[,X..].")] = joined(
        BUILT_IN.wrong_shares
    ),
    suite: str = SIX_TASKS,
    limit: Annotated[int, typer.Option(help="Prompts, spread evenly.")] = 6,
    max_new_tokens: int = BUILT_IN.max_new_tokens,
    repeats: int = BUILT_IN.repeats,
    draft_vocab_size: int = BUILT_IN.draft_vocab_size,
    seed: int = BUILT_IN.seed,
) -> None:
    """Measure, then write."""
    sweep = dialled.Sweep(
        layers=layers,
        extra_layers=tuple(map(int, extra_layers.split(","))),
        max_draft_tokens=tuple(map(int, max_draft_tokens.split(","))),
        wrong_shares=tuple(map(float, wrong_shares.split(","))),
        draft_vocab_size=draft_vocab_size,
        max_new_tokens=max_new_tokens,
        repeats=repeats,
        seed=seed,
    )
    questions = load_suite(suite, limit=limit)
    base = selfspec.load(model, dtype=dtype, executor="generic")
    output.mkdir(parents=True, exist_ok=True)
    options = {"model": base.label, "dtype": dtype, "suite": suite, "limit": limit, **asdict(sweep)}
    described = json.loads(json.dumps({"options": options, "machine": machine()}))
    write(output / "run.yaml", yaml.safe_dump(described, sort_keys=False))
    runs = list(
        track(
            dialled.measure(base, questions, sweep),
            "dialled",
            total=dialled.count_runs(sweep, len(questions)),
            console=Console(stderr=True),
        )
    )
    found = dialled.points(runs)
    lines = "".join(json.dumps(asdict(run)) + "\n" for run in runs)
    write(output / "runs.jsonl", lines)
    summary = [asdict(point) for point in found]
    write(output / "summary.json", json.dumps(summary, indent=2) + "\n")
    write(output / "table.md", markdown(found))
    save_figure(found, output / "dialled.png")
    print(markdown(found))


if __name__ == "__main__":
    typer.run(main)
