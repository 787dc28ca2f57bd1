r"""Figures over the answers to a suite: what layers know, where tokens leave, what is kept.

    python -m eval.visualise.figures --limit 12 --max-new-tokens 48 \\
        --output eval/results/visualise/default

Writes `traces/ID.jsonl` (with --keep), four pictures, and `figures.json` with their numbers and
what they were made of.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import track

import selfspec
from eval.called import command
from selfspec.eval.suites import SIX_TASKS, load_suite
from selfspec.files import write
from selfspec.visualise import figures
from selfspec.visualise.inspect import inspect


def main(
    output: Annotated[Path, typer.Option(help="Folder for pictures and numbers.")],
    suite: Annotated[str, typer.Option(help="As in selfspec trace.")] = SIX_TASKS,
    questions: Annotated[Path | None, typer.Option(help="The file of spec-bench.")] = None,
    limit: Annotated[int | None, typer.Option(help="Questions to take.")] = None,
    model: Annotated[str | None, typer.Option(help="As in selfspec trace.")] = None,
    heads: Annotated[str | None, typer.Option(help="As in selfspec trace.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Of each answer.")] = 64,
    *,
    all_layers: Annotated[bool, typer.Option(help="Layers without heads too.")] = True,
    keep: Annotated[bool, typer.Option(help="Keep every trace.")] = False,
) -> None:
    """Trace first turns, then draw."""
    chosen = load_suite(suite, questions, limit)
    output.mkdir(parents=True, exist_ok=True)
    speculator = selfspec.load(model, heads=heads)
    options: dict[str, Any] = {"all_layers": all_layers, "max_new_tokens": max_new_tokens}
    traces = []
    for question in track(chosen, "trace"):
        traces.append(inspect(speculator, question.turns[0], **options))
        if keep:
            (output / "traces").mkdir(exist_ok=True)
            traces[-1].save(output / "traces" / f"{question.id}.jsonl")
    info = traces[0].info
    made = {
        "command": command(),
        "prompts": len(traces),
        "model": info.base_model,
        "heads": info.heads,
        "dtype": info.dtype,
        "executor": info.executor,
    }
    found = {**made, **figures.save_all(traces, output)}
    write(output / "figures.json", json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
