"""Settings of drafters side by side: the same prompts in one run, each by all, in random order.

    python -m eval.side_by_side --drafter "chain=ngram+exit:guesses=1,max_tokens=2" \
        --drafter "tree=ngram+exit" --suite spec-bench --output eval/results/trees

First turns, greedy. Behind the prompt's own pass: times as fast as plain decoding, and as the first
setting; tokens and rows per verification, how often heads were asked, and where a round's time
went. All texts are compared with plain decoding's. `--numbers` takes de-quantised weights. Writes
`summary.json` and `table.md`; exit code 1 where a text differs.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

import selfspec
from eval.called import command
from selfspec.api.speculator import Speculator
from selfspec.cli import progress
from selfspec.cli.env import machine
from selfspec.eval.results import SIX_TASKS, Question, load_suite, ratio_interval
from selfspec.files import write

PLAIN = "plain"
PARTS = ("draft", "heads", "verify", "bookkeeping")


@dataclass
class Found:
    """What one setting did on all prompts."""

    seconds: list[float] = field(default_factory=list)
    """Behind the prompt's pass, by prompt."""
    counts: Counter[str] = field(default_factory=Counter)
    """Tokens, rounds, rows, how often heads were asked, and seconds by part."""
    texts: list[list[int]] = field(default_factory=list)


def main(
    output: Annotated[Path, typer.Option(help="Results folder.")],
    drafter: Annotated[list[str], typer.Option(help="NAME=DRAFTER, or NAME=DRAFTER;PRICES.")],
    model: str | None = None,
    heads: str | None = None,
    dtype: str | None = None,
    executor: str = "auto",
    suite: str = SIX_TASKS,
    questions: Annotated[Path | None, typer.Option(help="The suite's file.")] = None,
    limit: Annotated[int | None, typer.Option(help="Questions, spread over the suite.")] = None,
    new_tokens: int = 64,
    numbers: Annotated[bool, typer.Option(help="De-quantised weights.")] = False,
) -> None:
    """Write each answer with every setting."""
    speculator = loaded(model, heads, dtype, executor, numbers=numbers)
    asked = load_suite(suite, questions, limit)
    settings: dict[str, dict[str, Any]] = {PLAIN: {"speculate": False}, **map_of(drafter)}
    found = {name: Found() for name in settings}
    for values in settings.values():  # what is made once is not timed
        speculator.generate("Hello", max_new_tokens=8, **values | {"never_slower": False})
    with progress.bar("compare", "prompts") as show:
        for number, question in enumerate(asked):
            show(number, len(asked), question.id)
            answer(speculator, question, settings, new_tokens, found)
        show(len(asked), len(asked), "")
    tasks = [question.task for question in asked]
    summary = {
        "command": command(),
        "machine": machine(),
        "dtype": str(speculator.backbone.dtype),
        "executor": speculator.backbone.executor_name,
        "numbers": numbers,
        "prompts": len(asked),
        "new_tokens": new_tokens,
        "settings": {
            name: speculator.options.updated(values).described()
            for name, values in settings.items()
        },
        "found": {name: figures(found, name, tasks) for name in found},
    }
    output.mkdir(parents=True, exist_ok=True)
    write(output / "summary.json", json.dumps(summary, indent=2) + "\n")
    write(output / "table.md", as_text(summary))
    print(as_text(summary), end="")
    if any(entry["texts_equal"] < len(asked) for entry in summary["found"].values()):  # type: ignore[attr-defined]  # a dict
        raise SystemExit(1)


def loaded(
    model: str | None, heads: str | None, dtype: str | None, executor: str, *, numbers: bool
) -> Speculator:
    """From the files as they are, or from weights that are numbers."""
    chosen = {} if executor == "auto" else {"executor": executor}
    asked = {} if dtype is None else {"dtype": dtype}
    if not numbers:
        return selfspec.load(model, heads=heads, **asked, **chosen)
    from selfspec.hub.models import load_model

    like = selfspec.load(model, heads=heads, **asked)
    plain, tokenizer, files = load_model(model, dtype=like.backbone.dtype)
    return selfspec.wrap(plain, tokenizer, heads=like.heads or "none", label=files.label, **chosen)


def map_of(drafters: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Keywords of `generate` by name, from NAME=DRAFTER[;PRICES]."""
    found: dict[str, dict[str, Any]] = {}
    for text in drafters:
        name, equals, rest = text.partition("=")
        drafter, _, prices = rest.partition(";")
        if not (equals and drafter) or name == PLAIN:
            raise typer.BadParameter(
                f"{text!r} is not NAME=DRAFTER. Give --drafter tree=ngram+exit"
            )
        found[name] = {"drafter": drafter} | ({"prices": prices} if prices else {})
    return found


def answer(
    speculator: Speculator,
    question: Question,
    settings: Mapping[str, Mapping[str, Any]],
    new_tokens: int,
    found: Mapping[str, Found],
) -> None:
    """One prompt with all settings, in an order that depends on the question alone."""
    order = list(settings)
    random.Random(question.id).shuffle(order)
    for name in order:
        stream = speculator.stream(
            question.turns[0], max_new_tokens=new_tokens, do_sample=False, **settings[name]
        )
        made = stream.drain()
        stats, entry = made.stats, found[name]
        entry.seconds.append(stats.decode_s)
        entry.texts.append(list(made.token_ids))
        entry.counts["tokens"] += stats.accepted + stats.bonus
        entry.counts["rounds"] += stats.rounds
        entry.counts["rows"] += stats.drafted + stats.rounds
        entry.counts["asked"] += sum(one.heads for one in stream.rounds)
        entry.counts.update({part: stats.seconds[part] for part in PARTS})  # type: ignore[arg-type]  # Counter of seconds


def figures(found: Mapping[str, Found], name: str, tasks: Sequence[str]) -> dict[str, Any]:
    """Of one setting."""
    entry, plain = found[name], found[PLAIN]
    first = next(other for other in found if other != PLAIN)
    rounds = max(entry.counts["rounds"], 1)
    return {
        "over_plain": faster(plain.seconds, entry.seconds, tasks),
        f"over_{first}": faster(found[first].seconds, entry.seconds, tasks),
        "tokens_per_verification": entry.counts["tokens"] / rounds,
        "rows_per_verification": entry.counts["rows"] / rounds,
        "heads_per_round": entry.counts["asked"] / rounds,
        "ms_per_round": {part: 1e3 * entry.counts[part] / rounds for part in PARTS},
        "texts_equal": sum(a == b for a, b in zip(entry.texts, plain.texts, strict=True)),
    }


def faster(base: Sequence[float], mine: Sequence[float], tasks: Sequence[str]) -> dict[str, Any]:
    """Ratio of seconds: of all, its interval, the worst prompt's and by task.

    Prompts whose answer is one token have none behind the first, and are left out.
    """
    every = zip(base, mine, tasks, strict=True)
    pairs = [(a, b, task) for a, b, task in every if a > 0.0 and b > 0.0]
    theirs, ours = [a for a, _, _ in pairs], [b for _, b, _ in pairs]
    return {
        "ratio": sum(theirs) / sum(ours),
        "interval": ratio_interval(theirs, ours),
        "worst": min(a / b for a, b, _ in pairs),
        "tasks": {
            task: sum(a for a, _, t in pairs if t == task)
            / sum(b for _, b, t in pairs if t == task)
            for task in dict.fromkeys(task for _, _, task in pairs)
        },
    }


def as_text(summary: Mapping[str, Any]) -> str:
    """For people."""
    found: Mapping[str, Any] = summary["found"]
    lines = [
        f"{summary['prompts']} prompts, {summary['new_tokens']} tokens, "
        f"{summary['dtype'].removeprefix('torch.')}, {summary['executor']} executor"
        + (", de-quantised" if summary["numbers"] else ""),
    ]
    over = [key for key in next(iter(found.values())) if key.startswith("over_")]
    for key in over:
        tasks = list(next(iter(found.values()))[key]["tasks"])
        title = key.replace("_", " ")
        lines += ["", f"| {title} | all | worst | {' | '.join(tasks)} |"]
        lines += ["| --- |" + " ---: |" * (len(tasks) + 2)]
        for name, entry in found.items():
            low, high = entry[key]["interval"]
            cells = [f"{entry[key]['ratio']:.3f} ({low:.3f} to {high:.3f})"]
            cells += [f"{entry[key]['worst']:.2f}"]
            cells += [f"{entry[key]['tasks'][task]:.2f}" for task in tasks]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    titles = ["tokens", "rows", "heads asked", *(f"{part}, ms" for part in PARTS), "texts equal"]
    lines += ["", f"| per verification | {' | '.join(titles)} |"]
    lines += ["| --- |" + " ---: |" * len(titles)]
    for name, entry in found.items():
        counts = ("tokens_per_verification", "rows_per_verification", "heads_per_round")
        cells = [f"{entry[key]:.2f}" for key in counts]
        cells += [f"{entry['ms_per_round'][part]:.2f}" for part in PARTS]
        lines.append(f"| {name} | {' | '.join(cells)} | {entry['texts_equal']} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    typer.run(main)
