"""`selfspec bench --concurrency`: many answers at once, methods beside each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfspec import files
from selfspec.cli import common, env, progress
from selfspec.cli.settings import LOADING, SPECULATION, Settings, picked
from selfspec.errors import InvalidOption
from selfspec.eval.options import BenchOptions
from selfspec.typed import check_keys

if TYPE_CHECKING:
    from selfspec.api.speculator import Speculator
    from selfspec.eval.concurrency import Load

SUMMARY, TABLE = "concurrency.json", "concurrency.md"

JOINING_ROWS = 1500
"""Tokens of the prompt that joins others late."""

_BESIDE = 8


def run(asked: dict[str, Any], options: BenchOptions, reads: list[object]) -> str:
    """Measure and write; returns the tables. Raises InvalidOption for methods it does not know."""
    texts: tuple[int, ...] = asked["concurrency"]
    if min(texts) < 1:
        raise InvalidOption(f"concurrency holds {min(texts)}, expected at least 1")
    output = Path(asked["output"])
    for name in (SUMMARY, TABLE):
        files.check_file(output / name, overwrite=asked.get("overwrite", False), reads=reads)
    from selfspec.eval.results import load_suite, spread

    suite = load_suite(options.suite, Path(options.questions) if options.questions else None)
    prompts = [question.turns[0] for question in spread(suite, options.limit)]
    from selfspec.eval import concurrency
    from selfspec.eval.concurrency import table
    from selfspec.model.quantised import keep_numbers

    names: tuple[str, ...] = asked.get("methods", tuple(concurrency.METHODS))
    check_keys(names, concurrency.METHODS, "method")
    speculator = common.load(Settings(picked(asked, LOADING), picked(asked, SPECULATION)))
    keep_numbers(speculator.model)  # methods of Hugging Face run the model itself
    loads = _measured(speculator, prompts, texts, names, options)
    late = concurrency.joined_late(speculator, prompts[:_BESIDE], rows=JOINING_ROWS)
    summary = {
        "made_by": "selfspec bench",
        "run": {
            **options.record(),
            "methods": names,
            "concurrency": texts,
        },
        "prompts": len(prompts),
        "model": speculator.label,
        "dtype": str(speculator.backbone.dtype).removeprefix("torch."),
        "executor": speculator.backbone.executor_name,
        "machine": env.machine(),
        "loads": [load.summary() for load in loads],
        "joined_late": {"rows": JOINING_ROWS, "beside": min(_BESIDE, len(prompts)), **late},
    }
    text = (
        f"{table(loads)}\n{JOINING_ROWS} tokens join {min(_BESIDE, len(prompts))} "
        f"texts: a round takes {late['rounds']:.2f} of what it takes without (worst "
        f"{late['worst_rounds']:.2f}), the first token comes after {late['first_token_s']:.2f} s\n"
    )
    files.write(output / SUMMARY, json.dumps(summary, indent=2) + "\n")
    files.write(output / TABLE, f"<!-- written by selfspec bench -->\n{text}")
    return text


def _measured(
    speculator: Speculator,
    prompts: list[str],
    texts: tuple[int, ...],
    names: tuple[str, ...],
    options: BenchOptions,
) -> list[Load]:
    """With a bar."""
    from selfspec.eval.concurrency import measured

    loads: list[Load] = []
    with progress.bar("concurrency", "measurements") as show:
        total = len(texts) * len(names) * options.repeats
        show(0, total)
        for load in measured(
            speculator,
            prompts,
            texts=texts,
            new_tokens=options.max_new_tokens,
            methods=names,
            repeats=options.repeats,
            seed=options.seed,
        ):
            loads.append(load)
            show(len(loads), total, f"{load.method}, {load.texts} texts")
    return loads
