"""One pass of many texts, one row each: its time by how many texts there are.

    python -m eval.many_texts --output eval/results/many-texts

What a step of plain decoding costs when several people are served: layers, logits, and the best
token read back. Writes `summary.json` and `table.md`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from eval.called import command
from eval.side_by_side import loaded
from selfspec.cli.measure import machine
from selfspec.decoding.clock import Clock
from selfspec.files import write
from selfspec.model.backbone import Backbone
from selfspec.model.kv_store import Lease
from selfspec.model.rows import Rows


def main(
    output: Annotated[Path, typer.Option(help="Results folder.")],
    model: str | None = None,
    dtypes: Annotated[str, typer.Option(help="With commas.")] = "bfloat16,float32",
    executor: str = "auto",
    texts: Annotated[str, typer.Option(help="How many, with commas.")] = "1,2,4,8,16,32",
    in_front: Annotated[int, typer.Option(min=1, help="Ids of each text.")] = 300,
    repeats: Annotated[int, typer.Option(min=1, help="In turns; medians count.")] = 15,
) -> None:
    """Measure, then write."""
    counts = [int(count) for count in texts.split(",")]
    found = []
    for dtype in dtypes.split(","):
        for numbers in (False, True):
            backbone = loaded(model, None, dtype, executor, numbers=numbers).backbone
            seconds = measured(backbone, counts, in_front, repeats)
            weights = "numbers" if numbers else "as in the file"
            found.append({"dtype": dtype, "weights": weights, "ms": seconds})
    summary = {
        "command": command(),
        "machine": machine(),
        "in_front": in_front,
        "found": found,
    }
    output.mkdir(parents=True, exist_ok=True)
    write(output / "summary.json", json.dumps(summary, indent=2) + "\n")
    write(output / "table.md", as_text(summary))
    print(as_text(summary), end="")


@torch.inference_mode()
def measured(
    backbone: Backbone, counts: Sequence[int], in_front: int, repeats: int
) -> dict[int, float]:
    """Milliseconds of a step of so many texts."""
    ids = torch.arange(in_front) % backbone.vocab_size
    leases = [Lease(backbone.num_layers) for _ in range(max(counts))]
    for lease in leases:
        rows = Rows.of(lease, 0, in_front, backbone.device)
        backbone.run(backbone.embed(ids), 0, backbone.num_layers, rows)
    works = {count: partial(step, backbone, leases[:count], in_front) for count in counts}
    return {n: 1e3 * s for n, s in Clock(backbone.device, repeats).seconds(works).items()}


def step(backbone: Backbone, leases: Sequence[Lease], in_front: int) -> list[int]:
    """The best token of each text behind one more id; the leases stay as they were."""
    ids: Tensor = torch.arange(len(leases), device=backbone.device) % backbone.vocab_size
    rows = Rows.joined([Rows.of(lease, in_front, 1, backbone.device) for lease in leases])
    hidden = backbone.run(backbone.embed(ids), 0, backbone.num_layers, rows)
    best: list[int] = backbone.logits(hidden).argmax(-1).tolist()
    for lease in leases:
        lease.truncate(in_front)
    return best


def as_text(summary: dict[str, Any]) -> str:
    """For people."""
    counts = list(summary["found"][0]["ms"])
    lines = [
        f"Milliseconds of a step of many texts, one row each, behind {summary['in_front']} ids; "
        "in brackets: tokens per time, against one text",
        "",
        f"| texts | {' | '.join(map(str, counts))} |",
        "| --- |" + " ---: |" * len(counts),
    ]
    for entry in summary["found"]:
        one = entry["ms"][counts[0]] / int(counts[0])
        cells = [f"{ms:.1f} ({int(n) * one / ms:.2f})" for n, ms in entry["ms"].items()]
        lines.append(f"| {entry['dtype']}, {entry['weights']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    typer.run(main)
