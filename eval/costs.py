"""Estimates drafters' speed-ups at other sizes and the costs of heads and tokens; runs no model.

    python -m eval.costs --output results/costs

docs/guides/costs.md has the formulas, and says what is measured, cited and assumed. Reads costs of
rows (eval/results/sizes), tokens per verification (eval/results/policies-bf16-amx) and agreement
(eval/results/heads/agreement). Writes `summary.json` and `table.md`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
import yaml

from eval import lab
from eval.lab import SHAPES, Shape
from eval.micro import best_chain, in_steps
from selfspec.training.features import FeatureSpec

RESULTS, RUN = Path(__file__).parent / "results", "policies-bf16-amx"
POLICIES = {
    "prompt lookup": "ngram",
    "a datastore (REST)": "rest",
    "prompt lookup and a datastore": "ngram+rest",
    "lookahead, N, W, G = 3, 2, 2": "lookahead",
    "lookahead, 5, 7, 7": "lookahead-5-7-7",
    "prompt lookup and exit heads": "ngram+exit",
}
SMALL, LARGE = "135M", "70B"
MEDUSA_TOKENS, MEDUSA_ROWS, MEDUSA_HEADS = 2.32, 64, 4
EAGLE3, CHAIN = {"1B": 2.77, "8B": 2.77, LARGE: 2.88}, 7
"""Published tokens per verification with chains of CHAIN drafts; 1B takes the figure of 8B."""
DRAFT_VOCABULARY = 8192
GPUS = {"8B": 1, LARGE: 4}
POSITIONS, TEXTS, EPOCHS, CONTEXT = 1.64, 128, 2, 1000
"""Positions of text per answer token; texts per batch; epochs; context tokens of each text."""


class Gpus(NamedTuple):
    """The GPUs of one model, with their combined rates."""

    number: int
    flops: float
    bytes_per_s: float
    dollars: float  # per hour


class Size(NamedTuple):
    shape: Shape
    rows: Mapping[int, float]  # cost of a pass by its rows, in plain steps
    step: float  # bytes that are read in the time of a plain step


def main(
    output: lab.Output,
    tokens: Annotated[float, typer.Option(help="Answer tokens to fit heads on.")] = 1e8,
    flops: Annotated[float, typer.Option(help="FLOP/s of a GPU in practice.")] = 4e14,
    bandwidth: Annotated[float, typer.Option(help="Bytes/s of a GPU in practice.")] = 2.5e12,
    dollars: Annotated[float, typer.Option(help="Dollars per GPU hour.")] = 2.5,
) -> None:
    run, by_size, heads, served = read(RUN), sizes(), [], []
    overall, small = run["all"]["overall"], by_size[SMALL]
    gains = {"135M, measured": {p: overall[m]["over_plain"]["ratio"] for p, m in POLICIES.items()}}
    for name, size in by_size.items():
        gains[name] = dict(policies(name, size, run, exit_head(small.shape) / small.step))
        if count := GPUS.get(name):
            gpus = Gpus(count, count * flops, count * bandwidth, count * dollars)
            heads += [fit_row(name, size, gpus, tokens, kind) for kind in ("deep-fused", "eagle3")]
            served += [serving_row(name, size, gpus, texts) for texts in (1, 16, 64)]
    by_policy = [
        {"policy": policy}
        | {name: f"{times[policy]:.2f}" if policy in times else "" for name, times in gains.items()}
        for policy in gains["8B"]
    ]
    text = ""
    for title, rows in (
        ("Policies at other sizes, simulated", by_policy),
        (f"Heads from {tokens:,.0f} answer tokens, estimated", heads),
        ("Served tokens, estimated", served),
    ):
        text += f"# {title}\n\n{lab.table(rows[0], (row.values() for row in rows))}\n"
    lab.finish(output, {"gains": gains, "heads": heads, "served": served}, text)


def read(name: str) -> Any:
    return json.loads((RESULTS / name / "summary.json").read_text(encoding="utf-8"))


def exit_head(shape: Shape) -> int:
    """The number of weights of a deep-fused head and of its unembedding."""
    return 8 * shape.hidden_size**2 + DRAFT_VOCABULARY * shape.hidden_size


def sizes() -> dict[str, Size]:
    """Sizes by name. Row costs of 135M come from the policies' own run, those of 70B from 8B."""
    small, large = SHAPES["smollm2-135m"], SHAPES["llama-3.1-70b"]
    text = (RESULTS / RUN / "run.yaml").read_text(encoding="utf-8")
    added, head = yaml.safe_load(text)["speculation"]["costs"].removeprefix("row=").split(",head=")
    steps = np.cumsum([1.0, *map(float, added.split("/"))])
    found = {SMALL: Size(small, dict(enumerate(steps.tolist(), 1)), exit_head(small) / float(head))}
    for name, shape in (("1B", "llama-3.2-1b"), ("8B", "llama-3.1-8b")):
        figures = read("sizes")["sizes"][f"random-{shape}"]
        rows = {int(count): cost for count, cost in figures["rows"].items()}
        found[name] = Size(SHAPES[shape], rows, SHAPES[shape].eagle3 / figures["head"])
    base = found["8B"]
    step = base.step * large.weights / base.shape.weights
    return found | {LARGE: Size(large, base.rows, step)}


def policies(
    name: str, size: Size, run: Mapping[str, Any], small_head: float
) -> Iterator[tuple[str, float]]:
    """Yield speed-ups: tokens per verification over the cost of its rows and heads in steps."""
    head = exit_head(size.shape) / size.step
    for policy, method in POLICIES.items():
        figures, parts = run["all"]["overall"][method], run["parts_s"]
        tokens = figures["compression_rate"]
        cost = in_steps(1 + (tokens - 1) / figures["acceptance_rate"], size.rows)
        if "exit" in method:  # the seconds of the heads in that run give the queries per round
            cost += parts[method]["heads"] * tokens / parts["plain"]["verify"] / small_head * head
        yield policy, tokens / cost
    (by_kind,) = read("heads/agreement")["right"]["checkpoints/smollm2-135m-instruct"].values()
    kept = np.cumprod([1.0, *(right / count for right, count in by_kind["all"])]).cumsum()
    chains = (tokens / (in_steps(k + 1, size.rows) + k * head) for k, tokens in enumerate(kept))
    yield "exit heads, a chain", float(max(chains))
    if name in EAGLE3:
        width, vocab = size.shape.hidden_size, size.shape.vocab_size
        heads = MEDUSA_HEADS * (width**2 + vocab * width) / size.step
        yield "Medusa-1, its tree", MEDUSA_TOKENS / (in_steps(MEDUSA_ROWS, size.rows) + heads)
        gain, _ = best_chain(chance_of(EAGLE3[name]), size.rows, size.shape.eagle3 / size.step)
        yield "EAGLE-3, a chain", gain


def chance_of(tokens: float) -> float:
    """The chance that a draft is right, if chains of CHAIN give `tokens` per verification."""
    chances = np.linspace(0.0, 1.0, 1001)
    return float(np.interp(tokens, lab.expected_tokens(chances, CHAIN), chances))


def pass_s(shape: Shape, texts: int, rows: int, gpus: Gpus) -> float:
    """Seconds of a bfloat16 pass with `rows` of each text: limited by memory or by arithmetic."""
    bytes_read = 2 * shape.weights + texts * CONTEXT * 4 * shape.num_hidden_layers * shape.keys
    return max(bytes_read / gpus.bytes_per_s, 2 * shape.weights * texts * rows / gpus.flops)


def fit_row(name: str, size: Size, gpus: Gpus, tokens: float, kind: str) -> dict[str, str]:
    """A table row for fitting heads: hours with all GPUs, bytes and dollars, by column."""
    weights, positions, width = size.shape.weights, POSITIONS * tokens, size.shape.hidden_size
    per_draft = 6 * 11 * width**2 + 4 * DRAFT_VOCABULARY * width
    drafts, spec = 2, FeatureSpec((0, 1), deep=True, top_k=1)
    if kind == "eagle3":
        per_draft, drafts, spec = 6 * size.shape.eagle3, 3, FeatureSpec((0, 1, 2, 3), top_k=1)
    prompts_s = 2 * weights * (positions - tokens) / gpus.flops
    text_h = (prompts_s + tokens / TEXTS * pass_s(size.shape, TEXTS, 1, gpus)) / 3600
    features_h = 2 * weights * positions / gpus.flops / 3600
    fit_h = EPOCHS * drafts * per_draft * positions / gpus.flops / 3600
    return {
        "heads": f"{name}, {kind}",
        "GPUs": f"{gpus.number}",
        "text, h": f"{text_h:.1f}",
        "features, h": f"{features_h:.1f}",
        "fit, h": f"{fit_h:.1f}",
        "cache, TB": f"{positions * spec.bytes_per_token(width, 2) / 1e12:.1f}",
        "all, streamed, $": f"{(text_h + EPOCHS * features_h + fit_h) * gpus.dollars:,.0f}",
    }


def serving_row(name: str, size: Size, gpus: Gpus, texts: int) -> dict[str, str]:
    """A table row for serving: tokens per second of all texts, dollars per million, by column."""
    seconds = pass_s(size.shape, texts, 1, gpus)
    rows = {n: pass_s(size.shape, texts, n, gpus) / seconds for n in range(1, 10)}
    head = size.shape.eagle3 / size.shape.weights
    gain, drafts = best_chain(chance_of(EAGLE3[name]), rows, head)
    price = gpus.dollars / 3600 * 1e6 * seconds / texts
    return {
        "model": name,
        "GPUs": f"{gpus.number}",
        "texts": f"{texts}",
        "plain, tokens/s": f"{texts / seconds:,.0f}",
        "with drafts": f"{gain * texts / seconds:,.0f}",
        "times (drafts a round)": f"{gain:.2f} ({drafts})",
        "plain, $ a million": f"{price:.2f}",
        "with drafts, $": f"{price / gain:.2f}",
    }


if __name__ == "__main__":
    lab.run(main)
