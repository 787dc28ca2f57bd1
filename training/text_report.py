r"""Reports on text of `selfspec data` by family of prompts, and writes a page of samples.

    python training/text_report.py --data own.jsonl --output report

Writes `table.md` (rows, tokens, lengths, shares of loops and of dropped rows, the model's entropy
in answers and elsewhere) and `samples.md` (rows of each family, to be read by a person).
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import typer

import selfspec
from selfspec.files import write
from selfspec.training.features import pad_batch, plan_batches
from selfspec.training.records import entropies
from selfspec.training.text import DROPPED, from_ids


def main(
    data: Annotated[Path, typer.Option(help="File that selfspec data wrote.")],
    output: Annotated[Path, typer.Option(help="Folder of the report.")],
    model: Annotated[str | None, typer.Option(help="The model that wrote it.")] = None,
    entropy_rows: Annotated[int, typer.Option(help="Rows per family to measure entropy on.")] = 20,
    samples: Annotated[int, typer.Option(help="Rows per family on the page of samples.")] = 2,
    seed: int = 0,
) -> None:
    """Count, ask the model, write."""
    lines = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()]
    rng = random.Random(seed)
    chosen = {
        name: rng.sample(rows, min(len(rows), max(entropy_rows, samples)))
        for name, rows in by_family(lines).items()
    }
    counts = json.loads(data.with_name(data.name + ".run.json").read_text())["counts"]["families"]
    table = pd.concat([counted(lines, counts), uncertainty(chosen, model, entropy_rows)], axis=1)
    output.mkdir(parents=True, exist_ok=True)
    write(output / "table.md", markdown(table))
    write(
        output / "samples.md",
        "\n".join(page(name, rows[:samples]) for name, rows in chosen.items()),
    )
    print(markdown(table))


def by_family(lines: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Rows by their family of prompts, sorted by its name."""
    found: dict[str, list[dict[str, Any]]] = {}
    for line in sorted(lines, key=lambda line: str(line.get("family", ""))):
        found.setdefault(line.get("family", ""), []).append(line)
    return found


def counted(lines: list[dict[str, Any]], counts: dict[str, dict[str, int]]) -> pd.DataFrame:
    """By family: rows, tokens, lengths; in percent loops of answers and rows that were dropped."""
    rows = []
    for line in lines:
        ids, answers = from_ids(line)
        said = sum(end - first for first, end in answers)
        rows.append((line.get("family", ""), len(ids) - said, said, len(answers)))
    found = pd.DataFrame(rows, columns=["family", "prompt", "answer", "turns"])
    groups = found.groupby("family")
    dropped = pd.DataFrame(counts).T
    begun = dropped["rows"] + dropped[list(DROPPED)].sum(axis=1)
    return pd.DataFrame(
        {
            "rows": groups.size(),
            "answer tokens": groups["answer"].sum(),
            "other tokens": groups["prompt"].sum(),
            "prompt median": groups["prompt"].median(),
            "longest": groups["prompt"].max(),
            "answer median": groups["answer"].median(),
            "turns": groups["turns"].mean().round(2),
            "loops %": (100 * dropped["loops_cut"] / dropped["answers"]).round(1),
            **{
                f"{name.replace('_', ' ')} %": (100 * dropped[name] / begun).round(1)
                for name in ("duplicates", "alike", "excluded", "unfinished", "too_long")
            },
        }
    )


@torch.no_grad()
def uncertainty(
    chosen: dict[str, list[dict[str, Any]]], model: str | None, count: int
) -> pd.DataFrame:
    """By family: the model's mean entropy in nats at positions of answers, and at all others."""
    backbone = selfspec.load(model, dtype="bfloat16", executor="generic", heads="none").backbone
    found = {}
    for name, rows in chosen.items():
        sums = {True: [0.0, 0], False: [0.0, 0]}
        for group in plan_batches([from_ids(row) for row in rows[:count]], 4096):
            batch = pad_batch(group)
            (hidden,) = backbone.states(batch.ids, (backbone.num_layers,))
            for answers in (True, False):
                here = batch.predicts if answers else batch.has_next & ~batch.predicts
                values = entropies(backbone, hidden[here])
                sums[answers][0] += float(values.sum())
                sums[answers][1] += len(values)
        found[name] = {
            "entropy of answers": sums[True][0] / max(1, sums[True][1]),
            "entropy elsewhere": sums[False][0] / max(1, sums[False][1]),
        }
    return pd.DataFrame(found).T.round(2)


def markdown(table: pd.DataFrame) -> str:
    """The table with its sums."""
    sums = table[["rows", "answer tokens", "other tokens"]].sum()
    in_all = ", ".join(f"{n:,.0f} {k}" for k, n in sums.items())
    shown = table.rename_axis("family").to_markdown(floatfmt=",.6g", intfmt=",", missingval="")
    return f"{shown}\n\nIn all: {in_all}.\n"


def page(name: str, rows: list[dict[str, Any]]) -> str:
    """A family's rows as readable text."""
    text = f"## {name}\n"
    for row in rows:
        for turn in row.get("messages") or [{"role": "text", "content": row["text"]}]:
            quoted = turn["content"].strip().replace("\n", "\n> ")
            text += f"\n**{turn['role']}**\n\n> {quoted}\n"
        text += "\n---\n"
    return text


if __name__ == "__main__":
    typer.run(main)
