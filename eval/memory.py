r"""Measures the memory that loading a model takes, each time in a new process (Linux).

    python -m eval.memory --output eval/results/load-memory
    python -m eval.random_gguf --shape llama-3.2-3b random.gguf
    python -m eval.memory --model random.gguf --dtypes bfloat16 --executors auto \
        --output eval/results/load-memory-3b

Each case loads the model and writes a few tokens. The peak is the kernel's (VmHWM), above the
memory that imports take. The generic executor makes no copy. Writes `summary.json` and `table.md`.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from eval import lab

Found = TypeVar("Found")


def load(
    output: lab.Output,
    model: lab.Model = None,
    dtypes: Annotated[str, typer.Option(help="With commas.")] = "bfloat16,float32",
    executors: Annotated[str, typer.Option(help="With commas.")] = "auto,generic",
) -> None:
    cases = list(product(dtypes.split(","), executors.split(",")))
    in_new_process(measure_load, model, *cases[0])  # a first use may convert the file
    figures = [in_new_process(measure_load, model, *case) for case in cases]
    rows = []
    for case in figures:
        size, peaks = case["model_mb"], (case["loading_mb"], case["generating_mb"])
        cells = [f"{peak:.0f} MB = {peak / size:.2f} x" for peak in peaks]
        rows.append([f"{case['dtype']}, {case['executor']}", f"{size:.0f} MB", *cells])
    header = ("peak beyond the imports", "weights", "loading", "with an answer")
    lab.finish(output, {"cases": figures}, lab.table(header, rows))


def measure_load(model: str | None, dtype: str, executor: str) -> dict[str, Any]:
    """Megabytes: the model's weights, and the peaks after loading and after an answer."""
    base = resident_mb("VmRSS")
    speculator = lab.load(model, dtype=dtype, executor=executor)
    peak = resident_mb("VmHWM") - base
    speculator.generate("Why is the sky blue?", max_new_tokens=16, raw=True)
    weights = speculator.model.parameters()
    size = sum(getattr(weight, "blocks", weight).nbytes for weight in weights) / 1e6
    sizes = {"model_mb": size, "loading_mb": peak, "generating_mb": resident_mb("VmHWM") - base}
    return {"dtype": dtype, "executor": speculator.backbone.executor_name, **sizes}


def in_new_process(work: Callable[..., Found], *arguments: Any) -> Found:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work, arguments)


def resident_mb(name: str) -> float:
    """Memory of this process, in megabytes: VmRSS now, VmHWM at its peak."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    kilobytes = next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))
    return kilobytes * 1024 / 1e6


def peak_growth(work: Callable[[], object]) -> float:
    """Peak megabytes that `work` needs, beyond what is in use before it."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # else `work` would reuse freed memory, unseen
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    base = resident_mb("VmRSS")
    work()
    return resident_mb("VmHWM") - base


if __name__ == "__main__":
    lab.run(load)
