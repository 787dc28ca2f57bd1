r"""Times operations by their number of rows: those of a kind in turns, medians, in milliseconds.

    python -m eval.micro split --output results/split      # time of a pass by operation
    python -m eval.micro linear --output results/linear
    python -m eval.micro passes --python PYTHON --output results/passes  # against llama.cpp
    python -m eval.micro prompts --output results/prompts  # first token and memory, by length
    python -m eval.micro sizes --models A.gguf,B.gguf --output results/sizes  # drafts, simulated

PYTHON is an interpreter that has `llama-cpp-python`. Nothing else should run on the machine. Each
writes `summary.json` and `table.md`: a line for each operation, a column for each number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor, nn

from eval import lab
from eval.compare import LLAMA, worker
from eval.lab import SHAPES, Shape
from eval.memory import in_new_process, peak_growth
from selfspec.decoding.measure import Clock, Passes, memory_rate, step_speed
from selfspec.errors import check_keys
from selfspec.hub.models import default_model_file, load_model
from selfspec.model.backbone import Backbone
from selfspec.model.fused import Kind, Program
from selfspec.model.kv import KVCache, Rows
from selfspec.model.weights import CompiledLinear

InFront = Annotated[int, typer.Option(min=1, help="Context length before the rows.")]

HF, OURS = "hugging-face", "selfspec"
Work = Callable[[int], object]  # called with a number of rows
Seconds = Mapping[str, Mapping[int, float]]  # by operation, then by number of rows

CPU = torch.device("cpu")


def measure(
    operations: Mapping[str, Work], counts: Sequence[int], clock: Clock
) -> dict[str, dict[int, float]]:
    works = {(name, n): partial(work, n) for n in counts for name, work in operations.items()}
    by_operation: dict[str, dict[int, float]] = {}
    for (name, rows), seconds in clock.seconds(works).items():
        by_operation.setdefault(name, {})[rows] = seconds
    return by_operation


def as_table(
    header: str,
    seconds: Seconds,
    totals: Mapping[int, float] | None = None,
    extra: Mapping[str, Mapping[str, str]] | None = None,
) -> str:
    """A table; in brackets, shares of the first column or of `totals`; `extra`: further columns."""
    rows = list(dict.fromkeys(count for times in seconds.values() for count in times))
    lines = []
    for name, times in seconds.items():
        first = next(iter(times.values()))
        cells = [
            f"{1e3 * times[count]:.3f} ({times[count] / (totals[count] if totals else first):.2f})"
            if count in times
            else ""
            for count in rows
        ]
        lines.append([name, *cells, *(column.get(name, "") for column in (extra or {}).values())])
    return lab.table([header, *(f"{count:,}" for count in rows), *(extra or {})], lines)


# --- what a pass spends its time on

ALL, CALL, UNEMBEDDING = "all layers", "the call", "unembedding"
PARTS: Mapping[str, tuple[Kind, ...]] = {
    ALL: tuple(Kind),
    "linear layers": (Kind.LINEAR, Kind.EXPERTS),
    "attention": (Kind.ATTEND,),
    "norms": (Kind.NORM,),
    "activations, sums": (Kind.ACTIVATE, Kind.ADD),
    CALL: (),
}


@torch.inference_mode()
def split(
    output: lab.Output,
    model: lab.Model = None,
    dtype: lab.Dtype = None,
    blocks: Annotated[bool, typer.Option(help="Keep a file's weights quantised.")] = True,
    rows: lab.Numbers = "1,4,8",
    in_front: InFront = 300,
    repeats: lab.Repeats = 31,
) -> None:
    """Time the fused executor's operations of each kind.

    Each kind runs without the others, and its calls are included, so parts do not add up to the
    whole.
    """
    loaded, _, files = load_model(model, dtype=dtype, device="cpu", blocks=blocks)
    backbone, counts = Backbone(loaded, executor="fused"), lab.numbers(rows, int)
    executor: Any = backbone._executor
    whole: Program = executor._program
    kv, layers = KVCache(backbone.num_layers), backbone.num_layers
    ids = torch.arange(in_front + max(counts)) % backbone.vocab_size
    front, behind = backbone.embed(ids[:in_front]), backbone.embed(ids[in_front:])
    backbone.run(front, 0, layers, Rows.of(kv, 0, in_front, CPU))

    def run(program: Program, count: int) -> None:
        executor._program = program
        backbone.run(behind[:count], 0, layers, Rows.of(kv, in_front, count, CPU))
        kv.truncate(in_front)

    works: dict[str, Work] = {name: partial(run, whole.of_kinds(of)) for name, of in PARTS.items()}
    works[UNEMBEDDING] = lambda count: backbone.logits(behind[:count])
    seconds = measure(works, counts, Clock(CPU, repeats))
    facts = {"model": files.label, "dtype": str(backbone.dtype), "in_front": in_front}
    text = (
        f"Milliseconds of a pass by its parts and rows, {files.label}, {backbone.dtype}, behind "
        f"{in_front} ids; in brackets: share of layers and unembedding\n\n"
    )
    sums = {count: cost + seconds[UNEMBEDDING][count] for count, cost in seconds[ALL].items()}
    lab.finish(output, {**facts, "seconds": seconds}, text + as_table("part", seconds, sums))


# --- linear layers

_PATIENCE_S = 0.2  # a kernel that takes longer is not timed with more rows

_MOST_WEIGHTS = 100_000_000
"""Most weights of one layer: the unembedding of a large model is left out."""

MODELS = ("smollm2-135m", "llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b")


def linear(
    output: lab.Output,
    shapes: Annotated[str, typer.Option(help=f"Some of {', '.join(SHAPES)}.")] = ",".join(MODELS),
    dtypes: str = "bfloat16,float32",
    rows: lab.Numbers = "1,2,4,8,16,64,512",
    cold_mb: Annotated[int, typer.Option(help="Megabytes of weights, above all caches.")] = 200,
    repeats: lab.Repeats = 5,
) -> None:
    """Time the linear layers of a decoder layer, by our kernels and by torch's.

    Weights come from memory, as in a step: as many copies in turn as no cache holds. Beside the
    times: what part of the memory's rate one row reaches, and of the arithmetic's the most rows.
    """
    check_keys(shapes.split(","), SHAPES, "shape")
    clock, counts = Clock(CPU, repeats), lab.numbers(rows, int)
    memory, arithmetic = memory_rate(clock) / 1e9, arithmetic_rate(clock)
    cases = list(product(dtypes.split(","), shapes.split(",")))
    least, most, seconds = counts[0], counts[-1], dict[str, dict[int, float]]()
    read, computed = dict[str, str](), dict[str, str]()
    for dtype, shape in lab.track(cases, "time", "shapes"):
        for part, (out, inner) in _linear_layers(SHAPES[shape]):
            kind = getattr(torch, dtype)
            for kernel, times in time_layer(out, inner, kind, counts, cold_mb, clock).items():
                name = f"{shape} {dtype}, {part} {out}×{inner}, {kernel}"
                seconds[name] = times
                read[name] = f"{1e-9 * out * inner * kind.itemsize / times[least]:.1f}"
                if most in times:
                    computed[name] = f"{2e-9 * out * inner * most / times[most]:.1f}"
    rates = {f"GB/s, {least} rows": read, f"GFLOP/s, {most} rows": computed}
    text = (
        f"{torch.get_num_threads()} threads. Read: {memory:.1f} GB/s of memory by torch's sum. "
        f"Computed: {arithmetic:.0f} GFLOP/s by torch's float32 matmul. Milliseconds by rows; in "
        "brackets: in those of the first.\n\n"
    )
    summary = {"memory_gb_s": memory, "float32_gflop_s": arithmetic, "seconds": seconds}
    lab.finish(output, summary, text + as_table("product", seconds, extra=rates))


def _linear_layers(shape: Shape) -> Iterator[tuple[str, tuple[int, int]]]:
    width, inner = shape.hidden_size, shape.intermediate_size
    yield "queries, keys, values", (width + 2 * shape.keys, width)
    yield "output", (width, width)
    yield "gate, up", (2 * inner, width)
    yield "down", (width, inner)
    if shape.vocab_size * width <= _MOST_WEIGHTS:
        yield "head", (shape.vocab_size, width)


def time_layer(
    out: int, inner: int, dtype: torch.dtype, counts: Sequence[int], cold_mb: int, clock: Clock
) -> dict[str, dict[int, float]]:
    copies = max(1, min(24, cold_mb * 1_000_000 // (out * inner * dtype.itemsize)))
    weights = [torch.randn(out, inner).to(dtype) for _ in range(copies)]
    kernels: dict[str, list[Callable[[Tensor], object]]] = {
        "ours": [CompiledLinear(weight) for weight in weights],
        "torch": [partial(nn.functional.linear, weight=weight) for weight in weights],
    }
    times: dict[str, dict[int, float]] = {name: {} for name in kernels}
    for rows in counts:
        x = torch.randn(rows, inner).to(dtype)
        works = {name: partial(_run_all, layers, x) for name, layers in kernels.items()}
        for name, seconds in clock.seconds(works).items():
            times[name][rows] = seconds / copies
            if times[name][rows] > _PATIENCE_S:
                del kernels[name]
    return times


def _run_all(layers: Iterable[Callable[[Tensor], object]], x: Tensor) -> None:
    for multiply in layers:
        multiply(x)


def arithmetic_rate(clock: Clock) -> float:
    """Highest GFLOP/s of a large float32 matmul by torch."""
    square = torch.ones(2048, 2048)
    return float(2e-9 * len(square) ** 3 / min(clock.laps({"": lambda: square @ square})[""]))


# --- passes, against llama.cpp


@torch.inference_mode()
def passes(
    output: lab.Output,
    python: Annotated[str, typer.Option(help="Interpreter with llama-cpp-python.")],
    model: Annotated[Path | None, typer.Option(help=".gguf file; the default model's.")] = None,
    rows: lab.Numbers = "1,2,4,8,16,64,512",
    in_front: InFront = 300,
    dtype: lab.Dtype = None,
    threads: lab.Threads = 2,
    repeats: lab.Repeats = 15,
    numbers: Annotated[bool, typer.Option(help="Also run de-quantised weights.")] = True,
) -> None:
    """A pass of a GGUF file to the logits of all its rows, from blocks, from numbers, by llama.cpp.

    Beside it: what the memory allows, for the bytes that a pass of one row reads.
    """
    torch.set_num_threads(threads)
    counts, clock = lab.numbers(rows, int), Clock(CPU, repeats, warmups=2)
    loaded = {"blocks": Backbone(load_model(model, dtype=dtype, blocks=True)[0])}
    if numbers:
        loaded["numbers"] = Backbone(load_model(model, dtype=loaded["blocks"].dtype)[0])
    runs = {name: Passes(backbone, in_front, counts) for name, backbone in loaded.items()}
    gguf = model or default_model_file()
    with worker(LLAMA, python, gguf, threads, in_front + max(counts)) as ask:
        ids = runs["blocks"].ids.tolist()
        ask({"front": ids[:in_front]})
        works: dict[str, Work] = {name: run.run for name, run in runs.items()}
        works[LLAMA] = lambda count: ask({"rows": ids[in_front:][:count]})
        seconds = measure(works, counts, clock)
    rate = memory_rate(clock)
    read = {name: one.weight_bytes + in_front * one.position_bytes for name, one in loaded.items()}
    limits = {name: count / rate for name, count in read.items()}
    kind = str(loaded["blocks"].dtype)
    facts = {"dtype": kind, "in_front": in_front, "memory_bytes_per_s": rate, "limit_s": limits}
    text = (
        f"Milliseconds of one pass behind {in_front} ids, by rows; ours in {kind}; in brackets: in "
        "passes of one row\n\n"
    )
    extra = {"memory's limit of 1": {name: f"{1e3 * limit:.1f}" for name, limit in limits.items()}}
    lab.finish(output, {**facts, "seconds": seconds}, text + as_table("", seconds, extra=extra))


# --- prompts


def prompts(
    output: lab.Output,
    model: lab.Model = None,
    dtype: str = "float32",
    lengths: lab.Numbers = "300,2000,4096,8192",
    repeats: lab.Repeats = 3,
) -> None:
    """Measure time to first token and peak memory by prompt length, ours and Hugging Face's. Linux.

    Memory is measured in a separate process for each length and side: the kernel's peak (VmHWM)
    above the memory in use when the model was ready.
    """
    counts, names = lab.numbers(lengths, int), (OURS, HF)
    seconds = measure({n: reader(model, dtype, n) for n in names}, counts, Clock(CPU, repeats))
    peaks = {
        name: {count: in_new_process(peak_of, model, dtype, name, count) for count in counts}
        for name in names
    }
    text = f"Milliseconds to the first token by ids, {dtype}; in brackets: in Hugging Face's\n\n"
    text += as_table("", seconds, seconds[HF]) + "\nPeak memory above the ready model, in MB\n\n"
    rows = [[name, *(f"{peaks[name][count]:.0f}" for count in counts)] for name in peaks]
    summary = {"dtype": dtype, "seconds": seconds, "peak_mb": peaks}
    lab.finish(output, summary, text + lab.table(["", *(f"{n:,}" for n in counts)], rows))


def reader(model: str | None, dtype: str, name: str) -> Work:
    llm: Any = lab.load(model, dtype=dtype) if name == OURS else load_model(model, dtype=dtype)[0]

    def read(length: int) -> None:
        ids = torch.arange(length)[None] % 90  # every model has as many ids
        llm.generate(ids, max_new_tokens=1, do_sample=False)

    return read


def peak_of(model: str | None, dtype: str, name: str, length: int) -> float:
    """Peak megabytes above those of a loaded model that has answered once."""
    read = reader(model, dtype, name)
    read(16)
    return peak_growth(partial(read, length))


# --- drafts at other sizes

MOST_DRAFTS = 8


def sizes(
    output: lab.Output,
    models: Annotated[str, typer.Option(help="Files, separated by commas; weights may be random.")],
    rates: Annotated[str, typer.Option(help="With commas.")] = "0.4,0.5,0.6,0.7,0.8,0.9",
    dtype: lab.Dtype = None,
    repeats: lab.Repeats = 7,
) -> None:
    """Simulate the gain of chains of drafts by an EAGLE-3 head, from the measured costs of rows.

    Each draft is right with the same probability a where the one before is. W of them give
    (1 - a^(W + 1)) / (1 - a) tokens a verification, which costs a pass of W + 1 rows (measured) and
    W times the head: its bytes, at 8 bits a weight and 32,000 tokens, over those of a step.
    """
    chances = lab.numbers(rates, float)
    lines, by_model = [], {}
    for name in models.split(","):
        loaded, _, files = load_model(name, dtype=dtype, blocks=True)
        backbone = Backbone(loaded)
        speed = step_speed(backbone, clock=Clock(backbone.device, repeats))
        shape = Shape(*(getattr(loaded.config, field) for field in Shape._fields))
        head = shape.eagle3 / speed.step_bytes
        costs = {1: 1.0, **speed.rows_in_steps}
        best = {chance: best_chain(chance, costs, head) for chance in chances}
        by_model[files.label] = {"step_s": speed.step_s, "rows": costs, "head": head, "best": best}
        cells = [f"{gain:.2f} ({drafts})" for gain, drafts in best.values()]
        rows = ", ".join(f"{count}: {cost:.2f}" for count, cost in costs.items())
        lines.append([files.label, f"{1e3 * speed.step_s:.1f}", rows, f"{head:.3f}", *cells])
    columns = ["model", "ms a step", "rows", "head", *(f"a = {c:g}" for c in chances)]
    text = (
        "# Drafts at other sizes, simulated\n\nTimes plain decoding, and the drafts of a round "
        "that are best, by the chance a that a draft is right; costs in steps.\n\n"
    )
    lab.finish(output, {"sizes": by_model}, text + lab.table(columns, lines))


def best_chain(chance: float, costs: Mapping[int, float], head: float) -> tuple[float, int]:
    """The best speed-up over plain decoding, and its drafts per round."""

    def gain(drafts: int) -> float:
        tokens: float = lab.expected_tokens(chance, drafts)
        return tokens / (in_steps(drafts + 1, costs) + drafts * head)

    return max((gain(drafts), drafts) for drafts in range(MOST_DRAFTS + 1))


def in_steps(rows: float, costs: Mapping[int, float]) -> float:
    """Cost of a pass of `rows` rows, interpolated, or extrapolated from the last known costs."""
    (fewer, low), (most, high) = list(costs.items())[-2:]
    extra = max(0.0, rows - most) * (high - low) / (most - fewer)
    return float(np.interp(rows, list(costs), list(costs.values()))) + extra


if __name__ == "__main__":
    lab.run(split, linear, passes, prompts, sizes)
