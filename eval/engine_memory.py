"""Memory of an engine: a common prefix is kept once, and requests in and out leave no growth.

    python -m eval.engine_memory --output eval/results/engine-memory

32 texts of 1,000 tokens begin with the same 500: what their keys and values take at most, and what
they would without sharing. Then 10,000 short requests within 500 MB: the process's memory, and the
engine's, as they go. Writes `summary.json` and `table.md`.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import psutil
import torch
import typer

from eval.called import command
from eval.side_by_side import loaded
from selfspec.api.speculator import Speculator
from selfspec.cli.measure import machine
from selfspec.decoding.engine import Engine
from selfspec.files import write

_SHORT = 8
"""Ids of a short prompt at most, and tokens of its answer."""

_PREFIXES = 50
"""That short prompts begin with."""

_BUDGET = 500_000_000
"""Bytes for keys and values of short requests: what is kept for others fills it."""


def main(
    output: Annotated[Path, typer.Option(help="Results folder.")],
    model: str | None = None,
    dtype: str = "bfloat16",
    texts: Annotated[int, typer.Option(min=1, help="Long ones, at once.")] = 32,
    prefix: Annotated[int, typer.Option(min=1, help="Ids that they begin with alike.")] = 500,
    length: Annotated[int, typer.Option(min=2, help="Of a long text.")] = 1000,
    requests: Annotated[int, typer.Option(min=10, help="Short ones, one after another.")] = 10_000,
) -> None:
    """Measure, then write."""
    speculator = loaded(model, None, dtype, "auto", numbers=False)
    summary = {
        "command": command(),
        "machine": machine(),
        "dtype": dtype,
        "shared": shared(speculator, texts, prefix, length),
        "short": short(speculator, requests),
    }
    output.mkdir(parents=True, exist_ok=True)
    write(output / "summary.json", json.dumps(summary, indent=2) + "\n")
    write(output / "table.md", as_text(summary))
    print(as_text(summary), end="")


def shared(speculator: Speculator, texts: int, prefix: int, length: int) -> dict[str, Any]:
    """Bytes of keys and values of texts that begin alike."""
    engine = speculator.engine(most=texts)
    front = torch.arange(prefix)
    for number in range(texts):
        own = torch.tensor([number + 7])
        _add(engine, speculator, torch.cat((front, own)), length - prefix - 1)
    most = 0
    while engine.texts:
        engine.step()
        most = max(most, engine.memory.used)
    each = speculator.backbone.position_bytes
    return {
        "texts": texts,
        "prefix": prefix,
        "length": length,
        "bytes": most,
        "bytes_with_prefix_once": each * (prefix + texts * (length - prefix)),
        "bytes_without_sharing": each * texts * length,
    }


def short(speculator: Speculator, requests: int) -> list[dict[str, int]]:
    """The process's memory and the engine's, ten times on the way."""
    engine = speculator.engine(kv_memory=_BUDGET)
    dice, process = random.Random(0), psutil.Process()
    found = []
    for number in range(1, requests + 1):
        ids = torch.tensor([dice.randrange(_PREFIXES), *range(dice.randrange(1, _SHORT))])
        _add(engine, speculator, ids, dice.randrange(1, _SHORT))
        while engine.texts >= 32:
            engine.step()
        if number % (requests // 10) == 0:
            while engine.texts:
                engine.step()
            memory = engine.memory
            found.append(
                {
                    "requests": number,
                    "process": process.memory_info().rss,
                    "used": memory.used,
                    "kept": memory.kept,
                }
            )
    return found


def _add(engine: Engine, speculator: Speculator, ids: torch.Tensor, count: int) -> None:
    call = speculator.call(ids[None], {"max_new_tokens": count, "do_sample": False})
    engine.add(replace(call.request, end_tokens=frozenset()).only(), call.speculation)


def as_text(summary: dict[str, Any]) -> str:
    """Markdown."""
    one, mega = summary["shared"], 1e6
    lines = [
        f"{one['texts']} texts of {one['length']} tokens that begin with the same {one['prefix']}: "
        f"{one['bytes'] / mega:.0f} MB of keys and values at most; with the prefix once "
        f"{one['bytes_with_prefix_once'] / mega:.0f}, without sharing "
        f"{one['bytes_without_sharing'] / mega:.0f}",
        "",
        "| short requests | process, MB | in use, MB | kept for texts to come, MB |",
        "| ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {entry['requests']:,} | {entry['process'] / mega:.0f} | {entry['used'] / mega:.0f} | "
        f"{entry['kept'] / mega:.0f} |"
        for entry in summary["short"]
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    typer.run(main)
