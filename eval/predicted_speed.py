"""Predicted against measured: what replay and measured costs promise, and what a run gives.

Records prompts, takes the fastest predicted setting and nine random ones, then runs them all and
plain decoding, per prompt in random order. Writes `summary.json` and `table.md`:

    python -m eval.predicted_speed --limit 6 --output eval/results/predicted-bf16
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import track

import selfspec
from eval.called import command
from selfspec.api.speculator import Speculator
from selfspec.api.tuned import conditions
from selfspec.cli import progress
from selfspec.config import SpeculationOptions
from selfspec.decoding.measure import measure
from selfspec.eval.record import Record
from selfspec.eval.suites import load_suite
from selfspec.eval.totals import plain_seconds, predicted_seconds, totals
from selfspec.eval.trace import record
from selfspec.eval.trace_options import RecordOptions
from selfspec.eval.tune import candidates
from selfspec.files import write
from selfspec.options.text import text

PLAIN = {"speculate": False}


def main(
    output: Annotated[Path, typer.Option(help="Results folder.")],
    heads: str | None = None,
    dtype: str = "bfloat16",
    limit: Annotated[int, typer.Option(help="Questions, spread over the suite.")] = 6,
    new_tokens: int = 48,
    settings: Annotated[int, typer.Option(help="How many to run.")] = 10,
    repeats: Annotated[int, typer.Option(help="Of which the fastest counts.")] = 3,
    seed: int = 0,
) -> None:
    """Record, predict, run, compare."""
    speculator = selfspec.load(heads=heads, dtype=dtype)
    questions = [
        replace(question, turns=question.turns[:1])  # later turns would need the earlier answers
        for question in load_suite(limit=limit)
    ]
    with progress.bar("record", "questions") as show:
        made = record(speculator, questions, RecordOptions(max_new_tokens=new_tokens), show)
    rows = made.info.max_draft_tokens + 1
    costs = measure(speculator.backbone, speculator.heads, rows=rows, context=made.mean_context)
    every = candidates(made, 2)
    seconds = predicted_seconds(totals(made, every), costs).sum(-1)
    plain = float(plain_seconds(made, costs).sum())
    dice = random.Random(seed)  # an order of work, no secret
    chosen = [int(seconds.argmin()), *dice.sample(range(len(every)), settings - 1)]
    ways = [options_of(every[index]) for index in chosen]
    prompts = [question.turns[0] for question in questions]
    *speculating, plainly = run(speculator, made, prompts, [*ways, PLAIN], dice, repeats)
    results = [
        {"options": way, "predicted": plain / float(seconds[index]), "measured": plainly / found}
        for way, index, found in zip(ways, chosen, speculating, strict=True)
    ]
    facts = {"costs": asdict(costs), "machine": machine(speculator), "nodes": len(made.tokens)}
    output.mkdir(parents=True, exist_ok=True)
    summary = json.dumps({"settings": results, **facts}, indent=2)
    write(output / "summary.json", summary + "\n")
    write(output / "table.md", table(results))
    print(table(results))


def run(
    speculator: Speculator,
    made: Record,
    prompts: list[str],
    ways: list[dict[str, Any]],
    dice: random.Random,
    repeats: int,
) -> list[float]:
    """Seconds behind the prompt's pass, by way: of each prompt the fastest repeat.

    All must write the tokens of the record.
    """
    totalled = [0.0] * len(ways)
    speculator.generate(prompts[0], max_new_tokens=8)  # warm-up
    for number, prompt in enumerate(track(prompts, description="run")):
        places = made.places(number)
        answer = made.answers[places.start : places.stop].tolist()
        asked: Any = {"max_new_tokens": made.prompts[number].max_new_tokens, "do_sample": False}
        best = [float("inf")] * len(ways)
        for _ in range(repeats):
            for way in dice.sample(range(len(ways)), len(ways)):
                found = speculator.generate(prompt, **asked, **ways[way])
                if found.token_ids != answer:
                    raise SystemExit(f"prompt {number}: {ways[way]} gave other tokens")
                best[way] = min(best[way], found.stats.decode_s)
        totalled = [total + seconds for total, seconds in zip(totalled, best, strict=True)]
    return totalled


def options_of(setting: SpeculationOptions) -> dict[str, Any]:
    """Keywords of `generate`."""
    return {
        "speculate": True,
        "drafter": text(setting.exit, full=True),
        "never_slower": setting.never_slower,
    }


def machine(speculator: Speculator) -> dict[str, Any]:
    """What the figures depend on."""
    known = conditions(speculator.backbone, speculator.heads)
    return {**known, "torch": torch.__version__, "command": command()}


def table(results: list[dict[str, Any]]) -> str:
    """For people."""
    head = "| drafter | predicted | measured | ratio |"
    lines = [head, "|---|---|---|---|"]
    for row in results:
        cells = [
            row["options"]["drafter"],
            f"{row['predicted']:.2f}×",
            f"{row['measured']:.2f}×",
            f"{row['predicted'] / row['measured']:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    typer.run(main)
