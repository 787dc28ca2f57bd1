"""Wall time of three ways to decode the same questions: Hugging Face, plain, speculation.

    python eval/speed_table.py --questions question_dev.jsonl --output eval/results/speed-bf16

Per question all methods run in random order, so that machine drift hits them alike, and write the
same number of tokens: as many as plain decoding writes before its end token, 64 at most. One line
per question goes to `answers.jsonl`; an interrupted run goes on at the next question. Then
`table.md` and `summary.json` are made from those lines.
"""

from __future__ import annotations

import json
import platform
import random
import time
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import track

import selfspec
from selfspec.generate import Speculator
from selfspec.text import encode

METHODS = ("hugging-face", "plain", "speculation")
TASKS = {
    "math_reasoning": "math",
    "qa": "QA",
    "rag": "RAG",
    "summarization": "summary",
    "translation": "translation",
}
"""Spec-Bench's categories; all others are its multi-turn chat."""


def main(
    questions: Annotated[Path, typer.Option(help="Spec-Bench's question file.")],
    output: Annotated[Path, typer.Option(help="Results folder.")],
    model: str | None = None,
    heads: str | None = None,
    dtype: str = "bfloat16",
    new_tokens: int = 64,
    limit: Annotated[int | None, typer.Option(help="Questions, spread evenly.")] = None,
    seed: int = 0,
) -> None:
    """Measure, then write the table."""
    output.mkdir(parents=True, exist_ok=True)
    speculator = selfspec.load(model, heads=heads, dtype=dtype)
    asked = [json.loads(line) for line in questions.read_text("utf-8").splitlines()]
    asked = asked[:: max(1, len(asked) // (limit or len(asked)))]
    lines = output / "answers.jsonl"
    done = {json.loads(line)["id"] for line in lines.open()} if lines.exists() else set()
    shuffle = random.Random(seed)  # an order of work, no secret
    warm_up(speculator)
    for question in track(asked, description=dtype):
        if question["question_id"] not in done:
            record = measure(speculator, question, new_tokens, shuffle)
            with lines.open("a") as file:
                file.write(json.dumps(record) + "\n")
    records = [json.loads(line) for line in lines.open()]
    summary = {"machine": machine(speculator), "groups": summarise(records)}
    (output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    (output / "table.md").write_text(table(summary["groups"]))


def warm_up(speculator: Speculator) -> None:
    """Kernels and caches warm, for each method."""
    for method in METHODS:
        run(speculator, encode(speculator.tokenizer, "Count to ten."), 16, method)


def measure(
    speculator: Speculator, question: dict[str, Any], new_tokens: int, shuffle: random.Random
) -> dict[str, Any]:
    """Seconds, tokens and drafts of every method on one question's first turn."""
    ids = encode(speculator.tokenizer, question["turns"][0])
    plain = speculator.generate(ids, max_new_tokens=new_tokens, speculate=False)
    count = len(plain.token_ids)
    order = list(METHODS)
    shuffle.shuffle(order)
    found = {method: run(speculator, ids, count, method) for method in order}
    reference = found["plain"]["token_ids"]
    for entry in found.values():
        entry["equal"] = entry.pop("token_ids") == reference
    return {
        "id": question["question_id"],
        "task": TASKS.get(question["category"], "chat"),
        "prompt_tokens": ids.shape[1],
        "new_tokens": count,
        "methods": found,
    }


def run(speculator: Speculator, ids: torch.Tensor, count: int, method: str) -> dict[str, Any]:
    """One answer of exactly `count` tokens; end tokens do not end it."""
    model: Any = speculator.model
    ends, model.generation_config.eos_token_id = model.generation_config.eos_token_id, None
    start = time.perf_counter()
    try:
        if method == "hugging-face":
            mask = torch.ones_like(ids)
            output = model.generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False)
            seconds = time.perf_counter() - start
            return {"seconds": seconds, "token_ids": output[0, ids.shape[1] :].tolist()}
        answer = speculator.generate(
            ids, max_new_tokens=count, do_sample=False, speculate=method == "speculation"
        )
        seconds = time.perf_counter() - start
    finally:
        model.generation_config.eos_token_id = ends
    stats = answer.stats
    return {
        "seconds": seconds,
        "token_ids": answer.token_ids,
        "prefill_s": stats.ttft_s,
        "parts": dict(stats.seconds),
        "rounds": stats.rounds,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
    }


def summarise(records: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Per task and overall: ratios of total wall times, CR, acceptance, equal outputs."""
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        groups[record["task"]].append(record)
        groups["overall"].append(record)
    return {name: statistics(group) for name, group in groups.items()}


def statistics(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Figures of one group of questions."""
    seconds = {m: sum(r["methods"][m]["seconds"] for r in records) for m in METHODS}
    drafts = [r["methods"]["speculation"] for r in records]
    rounds, accepted = sum(d["rounds"] for d in drafts), sum(d["accepted"] for d in drafts)
    parts: dict[str, float] = defaultdict(float)
    for draft in drafts:
        for part, value in draft["parts"].items():
            parts[part] += value
    ratios = sorted(
        r["methods"]["plain"]["seconds"] / r["methods"]["speculation"]["seconds"] for r in records
    )
    tokens = sum(r["new_tokens"] for r in records)
    return {
        "questions": len(records),
        "new_tokens": tokens,
        "tokens_per_s": {m: tokens / seconds[m] for m in METHODS},
        "plain_over_hugging_face": seconds["hugging-face"] / seconds["plain"],
        "speculation_over_plain": seconds["plain"] / seconds["speculation"],
        "speculation_over_hugging_face": seconds["hugging-face"] / seconds["speculation"],
        "worst_question": ratios[0],
        "median_question": ratios[len(ratios) // 2],
        "compression_rate": (tokens - len(records)) / rounds if rounds else 0.0,
        "acceptance_rate": accepted / max(1, sum(d["drafted"] for d in drafts)),
        "bookkeeping_share": parts["bookkeeping"] / (sum(parts.values()) - parts["prefill"]),
        "equal_to_plain": {m: sum(r["methods"][m]["equal"] for r in records) for m in METHODS},
    }


def table(groups: dict[str, dict[str, Any]]) -> str:
    """The summary as Markdown; no arithmetic here."""
    head = (
        "| task | questions | plain / HF | speculation / plain | worst question "
        "| speculation / HF | CR | acceptance | equal to plain |\n" + "|---" * 9 + "|\n"
    )
    return head + "".join(
        f"| {name} | {g['questions']} | {g['plain_over_hugging_face']:.2f}× "
        f"| {g['speculation_over_plain']:.2f}× | {g['worst_question']:.2f}× "
        f"| {g['speculation_over_hugging_face']:.2f}× | {g['compression_rate']:.2f} "
        f"| {g['acceptance_rate']:.0%} | {g['equal_to_plain']['speculation']} |\n"
        for name, g in sorted(groups.items(), key=lambda item: item[0] == "overall")
    )


def machine(speculator: Speculator) -> dict[str, Any]:
    """What a reader needs to repeat the run."""
    return {
        "model": speculator.label,
        "dtype": str(speculator.backbone.dtype),
        "options": vars(speculator.options),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
        "versions": {name: version(name) for name in ("torch", "transformers", "selfspec")},
    }


if __name__ == "__main__":
    typer.run(main)
