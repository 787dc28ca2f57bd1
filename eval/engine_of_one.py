"""What an engine of one costs: a text on the engine, and its bare rounds, in turns.

    python -m eval.engine_of_one --output eval/results/engine-of-one

Seconds of 64 tokens behind a short prompt, with and without drafts. Nothing else should run. Writes
`summary.json` and `table.md`.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from eval.called import command
from eval.side_by_side import loaded
from selfspec.api.speculator import Speculator
from selfspec.cli.env import machine
from selfspec.config import SpeculationOptions
from selfspec.decoding.prices import Load
from selfspec.decoding.runtime import Asked
from selfspec.decoding.stats import Round
from selfspec.decoding.work import done_alone
from selfspec.files import write
from selfspec.model.kv_store import Lease

PROMPT = "Write a short story about a lighthouse keeper and a storm."


def main(
    output: Annotated[Path, typer.Option(help="Results folder.")],
    model: str | None = None,
    dtype: str = "bfloat16",
    new_tokens: Annotated[int, typer.Option(min=1)] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="In turns; medians count.")] = 25,
) -> None:
    """Measure, then write."""
    speculator = loaded(model, None, dtype, "auto", numbers=False)
    found = {}
    for name, speculate in (("plain", False), ("default", True)):
        found[name] = compared(speculator, speculate, new_tokens, repeats)
    summary = {
        "command": command(),
        "machine": machine(),
        "seconds": found,
    }
    output.mkdir(parents=True, exist_ok=True)
    write(output / "summary.json", json.dumps(summary, indent=2) + "\n")
    write(output / "table.md", as_text(found))
    print(as_text(found), end="")


@torch.inference_mode()
def compared(
    speculator: Speculator, speculate: bool, new_tokens: int, repeats: int
) -> dict[str, float]:
    """Medians of both ways, and of their ratio."""
    options: Any = {"max_new_tokens": new_tokens, "do_sample": False}

    def timed(way: Callable[[Speculator, Asked, SpeculationOptions], int]) -> float:
        call = speculator.call(PROMPT, options | {"speculate": speculate})
        asked = replace(call.request, end_tokens=frozenset()).only()
        start = time.perf_counter()
        tokens = way(speculator, asked, call.speculation)
        if tokens != new_tokens:
            raise RuntimeError(f"{tokens} tokens, expected {new_tokens}")
        return time.perf_counter() - start

    pairs = [(timed(bare), timed(on_engine)) for _ in range(repeats + 2)][2:]
    return {
        "bare rounds": statistics.median(one for one, _ in pairs),
        "engine of one": statistics.median(other for _, other in pairs),
        "ratio": statistics.median(other / one for one, other in pairs),
    }


def bare(speculator: Speculator, asked: Asked, options: SpeculationOptions) -> int:
    """No engine: each work is done where it comes up."""
    lease = Lease(speculator.backbone.num_layers)
    text = speculator.runtime.text(asked, options, Load(), lease=lease)
    tokens, sent = 0, None
    while True:
        try:
            found = text.steps.send(sent)
        except StopIteration:
            return tokens
        if isinstance(found, Round):
            tokens, sent = tokens + len(found.tokens), None
        else:
            sent = done_alone(found)


def on_engine(speculator: Speculator, asked: Asked, options: SpeculationOptions) -> int:
    """As `generate` does it."""
    lease = Lease(speculator.backbone.num_layers)
    running = speculator.engine(most=1).add(asked, options, lease=lease)
    return sum(len(entry.tokens) for entry in running)


def as_text(found: dict[str, dict[str, float]]) -> str:
    """Markdown."""
    lines = ["| | bare rounds, s | engine of one, s | ratio |", "| --- | ---: | ---: | ---: |"]
    lines += [
        f"| {name} | {one['bare rounds']:.4f} | {one['engine of one']:.4f} | {one['ratio']:.3f} |"
        for name, one in found.items()
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    typer.run(main)
