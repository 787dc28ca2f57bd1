"""What one matrix product costs, by rows: ours and torch's plain one, in turns.

    python -m eval.product_speed --output eval/results/products
    python -m eval.product_speed --shapes smollm2-135m --dtypes float32 --output results/products

The shapes are those of a layer's products. Every product is timed with weights that come from
memory, as in a step: as many copies in turn as no cache holds. Beside the times: what part of the
memory's rate one row reaches, and of the arithmetic's 512 rows, both measured here. Nothing else
should run on the machine. Writes `speed.json` and `speed.md`.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor, nn

from eval.called import command
from selfspec.cli.base import bar
from selfspec.cli.measure import machine
from selfspec.decoding.clock import Clock
from selfspec.decoding.speed import memory_rate
from selfspec.files import write
from selfspec.model.products import CompiledLinear

SHAPES: dict[str, dict[str, tuple[int, int]]] = {
    "smollm2-135m": {
        "queries, keys, values": (960, 576),
        "output": (576, 576),
        "gate, up": (3072, 576),
        "down": (576, 1536),
        "head": (49152, 576),
    },
    "llama-3.2-1b": {
        "queries, keys, values": (3072, 2048),
        "gate, up": (16384, 2048),
        "down": (2048, 8192),
    },
    "llama-3.2-3b": {
        "queries, keys, values": (5120, 3072),
        "gate, up": (16384, 3072),
        "down": (3072, 8192),
    },
    "llama-3.1-8b": {
        "queries, keys, values": (6144, 4096),
        "gate, up": (28672, 4096),
        "down": (4096, 14336),
    },
}
"""Outputs and inputs of a layer's products, by model."""

ROWS = (1, 2, 4, 8, 16, 64, 512)

_PATIENCE_MS = 200
"""A kernel that takes longer is not asked for more rows."""

Multiply = Callable[[Tensor], object]


@dataclass(frozen=True, kw_only=True)
class Speed:
    """One product's milliseconds by kernel, then by ROWS."""

    model: str
    part: str
    dtype: str
    out: int
    inner: int
    ms: dict[str, list[float]]

    def rate(self, kernel: str, rows: int) -> float:
        """GB/s of weights that are read."""
        size = 2 if self.dtype == "bfloat16" else 4
        return self.out * self.inner * size / self.ms[kernel][ROWS.index(rows)] / 1e6

    def flops(self, kernel: str, rows: int) -> float:
        """GFLOP/s."""
        return 2 * self.out * self.inner * rows / self.ms[kernel][ROWS.index(rows)] / 1e6


def main(
    output: Annotated[Path, typer.Option(help="Results folder.")],
    shapes: Annotated[str, typer.Option(help="Comma-separated names.")] = ",".join(SHAPES),
    dtypes: str = "bfloat16,float32",
    cold_mb: Annotated[int, typer.Option(help="Weights that no cache holds.")] = 200,
    repeats: Annotated[int, typer.Option(min=1, help="In turns; medians count.")] = 5,
) -> None:
    """Measure, then write."""
    if unknown := set(shapes.split(",")) - SHAPES.keys():
        raise typer.BadParameter(f"expected some of {', '.join(SHAPES)}, found {unknown.pop()}")
    asked = [
        (model, part, dtype)
        for dtype in dtypes.split(",")
        for model in shapes.split(",")
        for part in SHAPES[model]
    ]
    memory = memory_rate(Clock(torch.device("cpu"), repeats)) / 1e9
    arithmetic = arithmetic_rate()
    found = []
    with bar("time", "products") as show:
        for number, (model, part, dtype) in enumerate(asked):
            show(number, len(asked), f"{model}, {part}, {dtype}")
            found.append(timed(model, part, dtype, cold_mb, repeats))
        show(len(asked), len(asked), "")
    summary = {
        "command": command(),
        "machine": machine(),
        "memory_gb_s": memory,
        "float32_gflop_s": arithmetic,
        "rows": ROWS,
        "products": [asdict(speed) for speed in found],
    }
    page = "\n".join(markdown(found, memory, arithmetic)) + "\n"
    output.mkdir(parents=True, exist_ok=True)
    write(output / "speed.json", json.dumps(summary, indent=2) + "\n")
    write(output / "speed.md", page)
    print(page, end="")


def arithmetic_rate() -> float:
    """GFLOP/s of torch's largest float32 product, the best of five."""
    size = 2048
    square = torch.ones(size, size)
    best = min(_seconds(lambda other: square @ other, square, 1) for _ in range(5))
    return 2 * size**3 / best / 1e9


def timed(model: str, part: str, dtype: str, cold_mb: int, repeats: int) -> Speed:
    """All kernels in turns, all row counts."""
    out, inner = SHAPES[model][part]
    kind = getattr(torch, dtype)
    copies = max(1, min(24, cold_mb * 1_000_000 // (out * inner * kind.itemsize)))
    weights = [torch.randn(out, inner).to(kind) for _ in range(copies)]
    every: dict[str, list[Multiply]] = {
        "ours": [CompiledLinear(weight) for weight in weights],
        "torch": [partial(nn.functional.linear, weight=weight) for weight in weights],
    }
    ms: dict[str, list[float]] = {name: [] for name in every}
    for rows in ROWS:
        x = torch.randn(rows, inner).to(kind)
        seconds: dict[str, list[float]] = {name: [] for name in every}
        for _ in range(repeats):
            for name, products in every.items():
                seconds[name].append(_seconds(partial(_each, products), x, copies))
        for name, times in seconds.items():
            ms[name].append(1e3 * statistics.median(times))
            if ms[name][-1] > _PATIENCE_MS:
                every.pop(name)
                ms[name] += [math.nan] * (len(ROWS) - len(ms[name]))
    return Speed(model=model, part=part, dtype=dtype, out=out, inner=inner, ms=ms)


def _each(products: Sequence[Multiply], x: Tensor) -> None:
    for product in products:
        product(x)


def markdown(found: list[Speed], memory: float, arithmetic: float) -> list[str]:
    """Milliseconds by rows; then how near one row and 512 are to what the machine can do."""
    lines = [
        f"{torch.get_num_threads()} threads. Read: {memory:.1f} GB/s of memory by torch's sum. "
        f"Computed: {arithmetic:.0f} GFLOP/s by torch's float32 product. Milliseconds by rows.",
        "",
        "| product | by | " + " | ".join(map(str, ROWS)) + " | GB/s, 1 row | GFLOP/s, 512 rows |",
        "|---|---|" + "---|" * (len(ROWS) + 2),
    ]
    for speed in found:
        what = f"{speed.model} {speed.dtype}, {speed.part} {speed.out}×{speed.inner}"
        for kernel, times in speed.ms.items():
            cells = [what, kernel, *("" if math.isnan(ms) else f"{ms:.3f}" for ms in times)]
            last = speed.flops(kernel, ROWS[-1])
            cells += [f"{speed.rate(kernel, 1):.1f}", "" if math.isnan(last) else f"{last:.0f}"]
            lines.append(f"| {' | '.join(cells)} |")
            what = ""
    return lines


def _seconds(run: Callable[[Tensor], object], x: Tensor, times: int) -> float:
    """Of one of `times` calls that `run` makes."""
    start = time.perf_counter()
    run(x)
    return (time.perf_counter() - start) / times


if __name__ == "__main__":
    typer.run(main)
