"""What a pass of the fused executor spends its time on: its operations of one kind alone, in turns.

    python -m eval.step_split --output eval/results/step-split

Each kind runs without the others, and with what calling it takes, so parts do not add up to the
whole. Nothing else should run on the machine. Writes `summary.json` and `table.md`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from eval.called import command
from selfspec.cli.measure import machine
from selfspec.decoding.clock import Clock
from selfspec.files import write
from selfspec.hub.models import load_model
from selfspec.model.backbone import Backbone
from selfspec.model.executors.program import Kind, Program
from selfspec.model.kv_store import Lease
from selfspec.model.rows import Rows

PARTS: Mapping[str, tuple[Kind, ...]] = {
    "all layers": tuple(Kind),
    "products": (Kind.PRODUCT, Kind.EXPERTS),
    "attention": (Kind.ATTEND,),
    "norms": (Kind.NORM,),
    "activations, sums": (Kind.ACTIVATE, Kind.ADD),
    "the call": (),
}
WHOLE, UNEMBEDDING, REST = "all layers", "unembedding", "rest"
CALL = "the call"
_REST = ("norms", "activations, sums")
"""Each holds the call, which happens once."""


@torch.inference_mode()
def main(
    output: Annotated[Path, typer.Option(help="Results folder.")],
    model: Annotated[str | None, typer.Option(help="As of selfspec; the default model.")] = None,
    dtype: Annotated[str | None, typer.Option(help="As of selfspec.")] = None,
    blocks: Annotated[bool, typer.Option(help="Weights of a file stay as they are.")] = True,
    rows: Annotated[str, typer.Option(help="With commas.")] = "1,4,8",
    in_front: Annotated[int, typer.Option(min=1, help="Ids of the context.")] = 300,
    repeats: Annotated[int, typer.Option(min=1, help="In turns; medians count.")] = 31,
) -> None:
    """Measure, then write."""
    loaded, _, files = load_model(model, dtype=dtype, device="cpu", blocks=blocks)
    backbone = Backbone(loaded, executor="fused")
    counts = [int(count) for count in rows.split(",")]
    seconds = {count: split(backbone, count, in_front, repeats) for count in counts}
    summary = {
        "command": command(),
        "machine": machine(),
        "model": files.label,
        "dtype": str(backbone.dtype),
        "in_front": in_front,
        "seconds": seconds,
    }
    output.mkdir(parents=True, exist_ok=True)
    write(output / "summary.json", json.dumps(summary, indent=2) + "\n")
    write(output / "table.md", as_text(summary))
    print(as_text(summary), end="")


def split(backbone: Backbone, count: int, in_front: int, repeats: int) -> dict[str, float]:
    """Seconds of each part of a pass of `count` rows."""
    whole: Program = backbone._executor._program  # type: ignore[attr-defined]  # of the fused one
    lease, ids = Lease(backbone.num_layers), torch.arange(in_front + count) % backbone.vocab_size
    front, hidden = backbone.embed(ids[:in_front]), backbone.embed(ids[in_front:])
    backbone.run(front, 0, backbone.num_layers, Rows.of(lease, 0, in_front, ids.device))

    def run(program: Program) -> Tensor:
        backbone._executor._program = program  # type: ignore[attr-defined]  # put back below
        rows = Rows.of(lease, in_front, count, ids.device)
        found = backbone.run(hidden, 0, backbone.num_layers, rows)
        lease.truncate(in_front)
        return found

    works: dict[str, Callable[[], object]] = {
        name: partial(run, whole.only(kinds)) for name, kinds in PARTS.items()
    }
    try:
        seconds = Clock(backbone.device, repeats).seconds(
            works | {UNEMBEDDING: partial(backbone.logits, hidden)}
        )
    finally:
        backbone._executor._program = whole  # type: ignore[attr-defined]  # as above
    rest = sum(seconds[name] - seconds[CALL] for name in _REST) + seconds[CALL]
    return seconds | {REST: rest}


def as_text(summary: Mapping[str, Any]) -> str:
    """For people."""
    lines = [
        f"Milliseconds of a pass by its parts, {summary['model']}, "
        f"{summary['dtype'].removeprefix('torch.')}, behind {summary['in_front']} ids; in "
        "brackets: share of layers and unembedding",
        "",
        f"| rows | {' | '.join((*PARTS, UNEMBEDDING, REST))} |",
        "| ---: |" + " ---: |" * (len(PARTS) + 2),
    ]
    for count, seconds in summary["seconds"].items():
        step = seconds[WHOLE] + seconds[UNEMBEDDING]
        cells = [f"{1e3 * one:.2f} ({one / step:.0%})" for one in seconds.values()]
        lines.append(f"| {count} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    typer.run(main)
