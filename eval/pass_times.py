"""Time of a pass by its rows: from a GGUF file's blocks, from numbers, by llama.cpp, in turns.

    python -m eval.pass_times --python /path/to/python --output eval/results/passes

PYTHON is an interpreter that has `llama-cpp-python`. A pass goes through all layers, behind the
same ids, to the logits of all its rows. Beside it: what the memory allows, for the bytes that a
pass of one row reads. Nothing else should run. Writes `summary.json` and `table.md`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from eval.against_llama_cpp import LLAMA, worker
from eval.called import command
from selfspec.cli.measure import machine
from selfspec.decoding.clock import Clock
from selfspec.decoding.speed import Passes, memory_rate
from selfspec.files import write
from selfspec.hub.models import default_model_file, load_model
from selfspec.model.backbone import Backbone

BLOCKS, NUMBERS = "blocks", "numbers"


@torch.inference_mode()
def main(
    python: Annotated[str, typer.Option(help="Interpreter with llama-cpp-python.")],
    output: Annotated[Path, typer.Option(help="Results folder.")],
    model: Annotated[Path | None, typer.Option(help=".gguf file; the default model's.")] = None,
    rows: Annotated[str, typer.Option(help="With commas.")] = "1,2,4,8,16,64,512",
    in_front: Annotated[int, typer.Option(min=1, help="Ids of the context.")] = 300,
    dtype: Annotated[str | None, typer.Option(help="Of ours.")] = None,
    threads: Annotated[int, typer.Option(min=1, help="Of all.")] = 2,
    repeats: Annotated[int, typer.Option(min=1, help="In turns; medians count.")] = 15,
    numbers: Annotated[bool, typer.Option(help="De-quantised weights, too.")] = True,
) -> None:
    """Measure, then write."""
    torch.set_num_threads(threads)
    counts = [int(count) for count in rows.split(",")]
    gguf = model or default_model_file()
    loaded = {BLOCKS: Backbone(load_model(model, dtype=dtype, blocks=True)[0])}
    if numbers:
        loaded[NUMBERS] = Backbone(load_model(model, dtype=loaded[BLOCKS].dtype)[0])
    passes = {name: Passes(it, in_front, most=max(counts)) for name, it in loaded.items()}
    clock = Clock(torch.device("cpu"), repeats)
    with worker(python, gguf, threads, in_front + max(counts)) as ask:
        works = dict(_works(passes, counts) | _theirs(ask, passes[BLOCKS].ids, in_front, counts))
        found = clock.seconds(works)
    rate = memory_rate(clock)
    bytes_read = {name: it.weight_bytes + passes[name].lease.nbytes for name, it in loaded.items()}
    summary = {
        "command": command(),
        "machine": machine(),
        "dtype": str(loaded[BLOCKS].dtype),
        "in_front": in_front,
        "memory_bytes_per_s": rate,
        "limit_s": {name: count / rate for name, count in bytes_read.items()},
        "rows": counts,
        "seconds": {name: [found[name, count] for count in counts] for name in (*passes, LLAMA)},
    }
    output.mkdir(parents=True, exist_ok=True)
    write(output / "summary.json", json.dumps(summary, indent=2) + "\n")
    write(output / "table.md", as_text(summary))
    print(as_text(summary), end="")


def _works(passes: Mapping[str, Passes], counts: list[int]) -> dict[Any, Callable[[], object]]:
    return {
        (name, count): partial(one.run, count) for count in counts for name, one in passes.items()
    }


def _theirs(
    ask: Callable[[dict[str, Any]], object], ids: torch.Tensor, in_front: int, counts: list[int]
) -> dict[Any, Callable[[], object]]:
    ask({"front": ids[:in_front].tolist()})
    return {
        (LLAMA, count): partial(ask, {"rows": ids[in_front:][:count].tolist()}) for count in counts
    }


def as_text(summary: Mapping[str, Any]) -> str:
    """For people."""
    counts = summary["rows"]
    dtype = summary["dtype"].removeprefix("torch.")
    lines = [
        f"Milliseconds of one pass behind {summary['in_front']} ids, by rows; ours in {dtype}; in "
        "brackets: in passes of one row",
        "",
        f"| | {' | '.join(map(str, counts))} | memory's limit of 1 |",
        "| --- |" + " ---: |" * (len(counts) + 1),
    ]
    for name, seconds in summary["seconds"].items():
        cells = [f"{1e3 * one:.1f} ({one / seconds[0]:.2f})" for one in seconds]
        limit = summary["limit_s"].get(name)
        cells.append("" if limit is None else f"{1e3 * limit:.1f}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    typer.run(main)
