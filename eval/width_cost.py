"""What a wider draft vocabulary costs: a draft token's time, over the width of the heads.

    python -m eval.width_cost --output eval/results/heads

Times untrained deep-fused heads on the embedding (time does not depend on what was learned), as
`selfspec tune` does, interleaved with whole steps. Writes `width.json` and `width.md`. Coverage
over the same widths is in `table.md`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import selfspec
from selfspec.cli.measure import machine
from selfspec.decoding.measure import measure
from selfspec.files import write
from selfspec.heads.exit_heads import ExitHeads, HeadsConfig

WIDTHS = "4096,8192,16384,24576,32768"


def main(
    output: Annotated[Path, typer.Option(help="Results folder.")],
    model: str | None = None,
    dtype: str = "bfloat16",
    widths: Annotated[str, typer.Option(help="Beside the whole vocabulary.")] = WIDTHS,
) -> None:
    """Measure, write."""
    backbone = selfspec.load(model, dtype=dtype).backbone
    rows = []
    for width in (*map(int, widths.split(",")), backbone.vocab_size):
        narrow = width < backbone.vocab_size
        config = HeadsConfig(
            base_model="",
            base_fingerprint="",
            hidden_size=backbone.hidden_size,
            num_layers=backbone.num_layers,
            vocab_size=backbone.vocab_size,
            exit_layers=(0,),
            head_type="deep-fused",
            draft_vocab_size=width if narrow else None,
        )
        draft_ids = torch.arange(width) if narrow else None
        costs = measure(backbone, ExitHeads(config, backbone.unembedding, draft_ids), rows=2)
        rows.append({"width": width, "draft_s": costs.head, "share_of_step": costs.head_cost})
    output.mkdir(parents=True, exist_ok=True)
    found = {"machine": machine(), "widths": rows}
    write(output / "width.json", json.dumps(found, indent=2) + "\n")
    write(output / "width.md", table(rows))


def table(rows: list[dict[str, Any]]) -> str:
    """For people."""
    lines = ["| draft vocabulary | a draft token, ms | of a plain step |", "|---|---|---|"]
    for row in rows:
        cells = [
            f"{row['width']:,}",
            f"{1e3 * row['draft_s']:.2f}",
            f"{row['share_of_step']:.1%}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    typer.run(main)
