"""Time to first token and peak memory by prompt length: ours and Hugging Face's. Linux.

    python -m eval.prompt_speed --output eval/results/prompts-fp32 --dtype float32

Both read the same random ids, in turns, in one process; medians count. Memory is measured in
processes of their own, one for each length and side: the kernel's peak (VmHWM) above what was in
use when the model was ready. Nothing else should run. Writes `summary.json` and `table.md`.
"""

from __future__ import annotations

import ctypes
import gc
import json
import multiprocessing
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import selfspec
from eval.called import command
from eval.load_memory import memory
from selfspec.cli.measure import machine
from selfspec.decoding.clock import Clock
from selfspec.files import write
from selfspec.hub.models import load_model

OURS, THEIRS = "selfspec", "hugging-face"

_VOCABULARY = 90
"""Ids of the prompts lie below it: any model has so many."""


def main(
    output: Annotated[Path, typer.Option(help="Results folder.")],
    model: Annotated[str | None, typer.Option(help="Folder or hub id; the default model.")] = None,
    dtype: str = "float32",
    lengths: Annotated[str, typer.Option(help="With commas.")] = "300,2000,4096,8192",
    repeats: Annotated[int, typer.Option(min=1, help="In turns; medians count.")] = 3,
) -> None:
    """Measure, then write."""
    counts = [int(length) for length in lengths.split(",")]
    ways = {name: reader(model, dtype, name) for name in (OURS, THEIRS)}
    found = []
    for length in counts:
        clock = Clock(torch.device("cpu"), repeats)
        ids = torch.arange(length)[None] % _VOCABULARY
        works = {name: partial(read, ids) for name, read in ways.items()}
        found.append({"tokens": length, "seconds": clock.seconds(works), "peak_mb": {}})
        print(found[-1], flush=True)
    del ways
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for entry, name in product(found, (OURS, THEIRS)):
            peak = pool.apply(peak_of, (model, dtype, name, entry["tokens"]))
            entry["peak_mb"][name] = peak
    summary = {
        "command": command(),
        "machine": machine(),
        "dtype": dtype,
        "prompts": found,
    }
    output.mkdir(parents=True, exist_ok=True)
    write(output / "summary.json", json.dumps(summary, indent=2) + "\n")
    write(output / "table.md", table(dtype, found))
    print(table(dtype, found), end="")


def reader(model: str | None, dtype: str, name: str) -> Callable[[torch.Tensor], object]:
    """What reads ids [1, T] and writes one token."""
    if name == OURS:
        speculator = selfspec.load(model, dtype=dtype)
        return partial(speculator.generate, max_new_tokens=1, do_sample=False)
    own: Any = load_model(model, dtype=dtype)[0]

    def theirs(ids: torch.Tensor) -> None:
        own.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False)

    return theirs


def peak_of(model: str | None, dtype: str, name: str, length: int) -> float:
    """Megabytes at most, above what a ready model takes that has answered once."""
    read = reader(model, dtype, name)
    read(torch.arange(16)[None])
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what loading left behind would be used again, unseen
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = memory("VmRSS")
    read(torch.arange(length)[None] % _VOCABULARY)
    return memory("VmHWM") - before


def table(dtype: str, found: list[dict[str, Any]]) -> str:
    """What was found, for people."""
    lines = [
        f"Time to first token and peak memory above the ready model, {dtype}",
        "",
        "| prompt | ours | Hugging Face | ratio | memory, ours | Hugging Face |",
        "| ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for entry in found:
        ours, theirs = (entry["seconds"][name] for name in (OURS, THEIRS))
        peaks = [f"{entry['peak_mb'][name]:.0f} MB" for name in (OURS, THEIRS)]
        times = [f"{ours:.2f} s", f"{theirs:.2f} s", f"{ours / theirs:.2f}"]
        lines.append(f"| {entry['tokens']:,} | {' | '.join([*times, *peaks])} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    typer.run(main)
