r"""Memory: of loading a model, and of an engine that many texts come to and leave.

    python -m eval.memory load --output eval/results/load-memory
    python -m eval.random_gguf --shape llama-3.2-3b random.gguf
    python -m eval.memory load --model random.gguf --dtypes bfloat16 --executors auto \
        --output eval/results/load-memory-3b
    python -m eval.memory engine --output eval/results/engine-memory

`load` (Linux): each case runs in a process of its own, which loads the model and writes a few
tokens; the peak is the kernel's (VmHWM), beyond what importing takes. With the generic executor
there is no copy. `engine`: 32 texts of 1,000 tokens begin with the same 500: what their keys and
values take at most, and would without sharing. Then 10,000 short requests within 500 MB: the
process's memory and the engine's, as they go. Writes `summary.json` and `table.md`.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any, TypeVar

import psutil
import torch
import typer

from eval import lab
from selfspec.api.speculator import Speculator
from selfspec.decoding.engine import Engine

Found = TypeVar("Found")

app = typer.Typer(pretty_exceptions_enable=False)

_SHORT = 8
"""Ids of a short prompt at most, and tokens of its answer."""

_PREFIXES = 50
"""That short prompts begin with."""

_BUDGET = 500_000_000
"""Bytes for keys and values of short requests: what is kept for others fills it."""


@app.command()
def load(
    output: lab.Output,
    model: lab.Model = None,
    dtypes: Annotated[str, typer.Option(help="With commas.")] = "bfloat16,float32",
    executors: Annotated[str, typer.Option(help="With commas.")] = "auto,generic",
) -> None:
    """Load in every way, in turn."""
    cases = list(product(dtypes.split(","), executors.split(",")))
    apart(loading, model, *cases[0])  # a first use may convert the file
    found = [apart(loading, model, *case) for case in cases]
    rows = []
    for case in found:
        size, peaks = case["model_mb"], (case["loading_mb"], case["generating_mb"])
        cells = [f"{peak:.0f} MB = {peak / size:.2f} x" for peak in peaks]
        rows.append([f"{case['dtype']}, {case['executor']}", f"{size:.0f} MB", *cells])
    header = ("peak beyond the imports", "weights", "loading", "with an answer")
    lab.finish(output, {"cases": found}, lab.table(header, rows))


def loading(model: str | None, dtype: str, executor: str) -> dict[str, Any]:
    """Megabytes: the model's weights, and the peaks after loading and after an answer."""
    before = resident("VmRSS")
    speculator = lab.loaded(model, dtype=dtype, executor=executor)
    peak = resident("VmHWM") - before
    speculator.generate("Why is the sky blue?", max_new_tokens=16, raw=True)
    weights = speculator.model.parameters()
    size = sum(getattr(weight, "blocks", weight).nbytes for weight in weights) / 1e6
    return {
        "dtype": dtype,
        "executor": speculator.backbone.executor_name,
        "model_mb": size,
        "loading_mb": peak,
        "generating_mb": resident("VmHWM") - before,
    }


def apart(work: Callable[..., Found], *given: Any) -> Found:
    """Done in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work, given)


def resident(name: str) -> float:
    """Memory of this process, in megabytes: VmRSS now, VmHWM at most so far."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    kilobytes = next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))
    return kilobytes * 1024 / 1e6


def grown(work: Callable[[], object]) -> float:
    """Megabytes that `work` needs at most, beyond what is in use before it."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what came before left room that would be used unseen
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = resident("VmRSS")
    work()
    return resident("VmHWM") - before


@app.command()
def engine(
    output: lab.Output,
    model: lab.Model = None,
    dtype: str = "bfloat16",
    texts: Annotated[int, typer.Option(min=1, help="Long ones, at once.")] = 32,
    prefix: Annotated[int, typer.Option(min=1, help="Ids that they begin with alike.")] = 500,
    length: Annotated[int, typer.Option(min=2, help="Of a long text.")] = 1000,
    requests: Annotated[int, typer.Option(min=10, help="Short ones, one after another.")] = 10_000,
) -> None:
    """Long texts that share a prefix, then short ones."""
    speculator = lab.loaded(model, dtype=dtype)
    each = speculator.backbone.position_bytes
    share = {
        "bytes": shared(speculator, texts, prefix, length),
        "bytes_with_prefix_once": each * (prefix + texts * (length - prefix)),
        "bytes_without_sharing": each * texts * length,
    }
    held = short(speculator, requests)
    most, once, apart = (count / 1e6 for count in share.values())
    text = (
        f"{texts} texts of {length} tokens that begin with the same {prefix}: {most:.0f} MB of "
        f"keys and values at most; with the prefix once {once:.0f}, without sharing {apart:.0f}\n\n"
    )
    header = ("short requests", "process, MB", "in use, MB", "kept for texts to come, MB")
    rows = [[f"{n:,}", *(f"{count / 1e6:.0f}" for count in sizes)] for n, *sizes in held]
    lab.finish(
        output,
        {
            "dtype": dtype,
            "shared": {"texts": texts, "prefix": prefix, "length": length, **share},
            "short": held,
        },
        text + lab.table(header, rows),
    )


def shared(speculator: Speculator, texts: int, prefix: int, length: int) -> int:
    """Bytes of keys and values at most, of texts that begin alike."""
    engine, front = speculator.engine(most=texts), torch.arange(prefix)
    for number in range(texts):
        ids = torch.cat((front, torch.tensor([number + 7])))
        _add(engine, speculator, ids, length - prefix - 1)
    most = 0
    while engine.texts:
        engine.step()
        most = max(most, engine.memory.used)
    return most


def short(speculator: Speculator, requests: int) -> list[tuple[int, int, int, int]]:
    """Ten times on the way: requests; bytes of the process, of the engine in use and kept."""
    engine, dice, found = speculator.engine(kv_memory=_BUDGET), random.Random(0), []
    process = psutil.Process()
    for number in range(1, requests + 1):
        ids = torch.tensor([dice.randrange(_PREFIXES), *range(dice.randrange(1, _SHORT))])
        _add(engine, speculator, ids, dice.randrange(1, _SHORT))
        pause = number % (requests // 10) == 0
        while engine.texts >= (1 if pause else 32):
            engine.step()
        if pause:
            memory = engine.memory
            found.append((number, process.memory_info().rss, memory.used, memory.kept))
    return found


def _add(engine: Engine, speculator: Speculator, ids: torch.Tensor, count: int) -> None:
    request = speculator.call(ids[None], {"max_new_tokens": count, "do_sample": False})
    engine.add(replace(request, end_tokens=frozenset()).only(), request.speculation)


if __name__ == "__main__":
    lab.run(app)
