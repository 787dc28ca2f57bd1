r"""How much memory loading a model takes at most, beyond what importing the libraries takes. Linux.

    python -m eval.load_memory --output eval/results/load-memory
    python -m eval.random_gguf --shape llama-3.2-3b random.gguf
    python -m eval.load_memory --model random.gguf --dtypes bfloat16 --executors auto \
        --output eval/results/load-memory-3b

Each case runs in a process of its own, which loads the model and writes a few tokens; the peak is
the kernel's (VmHWM). With the generic executor there is no copy. Writes `summary.json` and
`table.md`.
"""

from __future__ import annotations

import json
import multiprocessing
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

from eval.called import command
from selfspec.cli.measure import machine
from selfspec.files import write


def main(
    output: Annotated[Path, typer.Option(help="Results folder.")],
    model: Annotated[str | None, typer.Option(help="Folder or hub id; the default model.")] = None,
    dtypes: Annotated[str, typer.Option(help="With commas.")] = "bfloat16,float32",
    executors: Annotated[str, typer.Option(help="With commas.")] = "auto,generic",
) -> None:
    """Load in every way, in turn."""
    cases = list(product(dtypes.split(","), executors.split(",")))
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        pool.starmap(loaded, [(model, *cases[0])], chunksize=1)  # a first use may convert the file
        found = pool.starmap(loaded, [(model, *case) for case in cases], chunksize=1)
    summary = {"command": command(), "machine": machine(), "cases": found}
    output.mkdir(parents=True, exist_ok=True)
    write(output / "summary.json", json.dumps(summary, indent=2) + "\n")
    write(output / "table.md", table(found))
    print(table(found))


def loaded(model: str | None, dtype: str, executor: str) -> dict[str, Any]:
    """Megabytes: the model's weights, and the peaks after loading and after an answer."""
    import selfspec  # imports first: they are not part of what is measured
    from selfspec.api.speculator import load  # noqa: F401  # torch and transformers

    before = memory("VmRSS")
    speculator = selfspec.load(model, dtype=dtype, executor=executor)
    loading = memory("VmHWM") - before
    speculator.generate("Why is the sky blue?", max_new_tokens=16, raw=True)
    weights = speculator.model.parameters()
    size = sum(getattr(weight, "blocks", weight).nbytes for weight in weights) / 1e6
    return {
        "dtype": dtype,
        "executor": speculator.backbone.executor_name,
        "model_mb": size,
        "loading_mb": loading,
        "generating_mb": memory("VmHWM") - before,
    }


def memory(name: str) -> float:
    """Of this process, in megabytes: VmRSS now, VmHWM at most so far."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    kilobytes = next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))
    return kilobytes * 1024 / 1e6


def table(cases: list[dict[str, Any]]) -> str:
    """What was found, for people."""
    lines = [
        "Peak memory beyond the imports",
        "",
        "| dtype | executor | weights | loading | with an answer |",
        "| --- | --- | --- | --- | --- |",
    ]
    for case in cases:
        size = case["model_mb"]
        peaks = (case["loading_mb"], case["generating_mb"])
        cells = " | ".join(f"{peak:.0f} MB = {peak / size:.2f} x" for peak in peaks)
        lines.append(f"| {case['dtype']} | {case['executor']} | {size:.0f} MB | {cells} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    typer.run(main)
