"""A plain step against the memory's limit: Hugging Face's and that of every executor, in turns.

    python -m eval.step_speed --output results/step                        # the default model
    python -m eval.step_speed --shape llama-2-7b --output results/step-7b  # random weights

On a GPU where there is one. Nothing else should run on the machine. Writes `speed.json` and
`speed.md`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import torch
import typer

from eval.device_speed import SHAPES, as_json, markdown, measure, random_model
from selfspec.cli.measure import machine
from selfspec.files import write
from selfspec.hub.models import load_model


def main(
    output: Annotated[Path, typer.Option(help="Results folder.")],
    model: str | None = None,
    shape: Annotated[
        str | None, typer.Option(help=f"Random weights instead: {', '.join(SHAPES)}.")
    ] = None,
    dtype: str = "bfloat16",
    device: str | None = None,
    context: Annotated[int, typer.Option(min=1, help="Tokens in front.")] = 256,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to write.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Interleaved; medians count.")] = 5,
) -> None:
    """Measure, then write."""
    if shape is not None and (model is not None or shape not in SHAPES):
        raise typer.BadParameter(f"expected one of {', '.join(SHAPES)}, without --model")
    if shape is None:
        loaded, _, files = load_model(model, dtype=dtype, device=device)
        weights = files.label
    else:
        place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        loaded = random_model(shape, getattr(torch, dtype), place)
        weights = f"random weights in the shape of {shape} (timing only)"
    found = measure(loaded, weights, context=context, new_tokens=new_tokens, repeats=repeats)
    page = "\n".join(markdown(found)) + "\n"
    output.mkdir(parents=True, exist_ok=True)
    record = {"machine": machine(), **as_json(found)}
    write(output / "speed.json", json.dumps(record, indent=2) + "\n")
    write(output / "speed.md", page)
    print(page, end="")


if __name__ == "__main__":
    typer.run(main)
