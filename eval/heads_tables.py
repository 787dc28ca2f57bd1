r"""What decides how often exit heads are right: their kind, their text, their draft vocabulary.

    selfspec data --from question_dev.jsonl --regenerate --max-new-tokens 96 --output answers.jsonl
    selfspec cache --data answers.jsonl --exit-layers 0,4,8,12,20 --output held-out
    python -m eval.heads_tables --cache features --held-out held-out --work /tmp/heads \\
        --output eval/results/heads

Fits heads of each kind to a part of a feature cache (with deep states), heads of one kind to
growing parts, and heads of one kind over growing draft vocabularies; measures all on features of
held-out text with `selfspec calibrate --dry-run`. A fit that is there already is not repeated.
Writes `table.md` and `table.json`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer

from eval import lab
from selfspec.files import write

KINDS = ("linear", "translator", "low-rank", "mlp", "deep-fused")
KIND_LAYERS = "4,12,20"
WIDTHS = (4096, 8192, 16384, 32768)


def main(
    cache: Annotated[Path, typer.Option(help="Feature cache with deep states.")],
    held_out: Annotated[Path, typer.Option(help="Feature cache to measure on.")],
    output: lab.Output,
    work: Annotated[Path, typer.Option(help="Where the fitted heads go.")],
    part: Annotated[int, typer.Option(help="Answer tokens of a fit, but for the curve.")] = 60_000,
    epochs: int = 2,
) -> None:
    """Fit, measure, write."""
    total = sum(json.loads((cache / "manifest.json").read_text())["answers"])
    shared = ["--cache", str(cache), "--epochs", str(epochs)]
    rows = []

    def add(table: str, name: str, *flags: str) -> None:
        folder = work / f"{table}-{name}".replace(" ", "-")
        if not (folder / "config.json").exists():
            selfspec("fit", *shared, *flags, "--output", str(folder))
        found = measured(folder, held_out)
        rows.append({"table": table, "name": name, **found})
        output.mkdir(parents=True, exist_ok=True)
        write(output / "table.json", json.dumps(rows, indent=2) + "\n")
        write(output / "table.md", markdown(rows))

    for kind in KINDS:
        layers = f"0,{KIND_LAYERS}" if kind == "deep-fused" else KIND_LAYERS
        flags = ["--head-type", kind, "--exit-layers", layers, "--max-tokens", str(part)]
        if kind == "linear":  # no identity to start from: the paper's rate, or nothing is learned
            flags += ["--learning-rate", "3e-4"]
        add("kind", kind, *flags)
    deep = ["--head-type", "deep-fused", "--exit-layers", "0"]
    for width in WIDTHS:
        flags = ["--max-tokens", str(part), "--draft-vocab-size", str(width)]
        add("draft vocabulary", f"{width:,}", *deep, *flags)
    for halvings in (4, 3, 2, 1):
        tokens = total >> halvings
        add("answer tokens", f"{tokens:,}", *deep, "--max-tokens", str(tokens))


def measured(folder: Path, held_out: Path) -> dict[str, Any]:
    """Agreement by layer on held-out text, coverage and size."""
    command = ["calibrate", "--heads", str(folder), "--cache", str(held_out), "--dry-run", "--json"]
    found = json.loads(selfspec(*command))
    return {
        "agreement": {k: entry["agreement"] for k, entry in found["layers"].items()},
        "second": next(iter(found["layers"].values()))["agreement_second"],
        "coverage": found["coverage"],
        "positions": found["positions"],
        "megabytes": (folder / "model.safetensors").stat().st_size / 1e6,
    }


def selfspec(*arguments: str) -> str:
    """Standard output of one command."""
    command = [sys.executable, "-m", "selfspec", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def markdown(rows: list[dict[str, Any]]) -> str:
    """A table for each question, shares as they are."""
    found = pd.json_normalize(rows).drop(columns="positions")
    tables = found.groupby("table", sort=False)
    shown = (t.drop(columns="table").rename(columns={"name": n}) for n, t in tables)
    return "\n\n".join(t.to_markdown(index=False, floatfmt=".3f") for t in shown) + "\n"


if __name__ == "__main__":
    lab.run(main)
