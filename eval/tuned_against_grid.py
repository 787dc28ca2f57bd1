"""What `selfspec tune` chooses, against the best of a grid of settings that are really run.

    python -m eval.tuned_against_grid --limit 12 --output eval/results/tuned-bf16

Tunes on some questions of the six tasks; then plain decoding, the tuned setting and all points of a
grid answer others, per prompt in random order. The grid's best is named twice: with hindsight, on
the very prompts that it is timed on, and found on one half of them and timed on the other, as any
real search would have it. Nothing else should run on the machine. Writes `run.yaml`,
`answers.jsonl`, `summary.json` and `table.md`.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

import selfspec
from eval.called import command
from selfspec.api.speculator import Speculator
from selfspec.cli import progress
from selfspec.cli.env import machine
from selfspec.decoding.measure import measure
from selfspec.errors import HeadsNotFound
from selfspec.eval import report
from selfspec.eval.bench import Bench
from selfspec.eval.methods import Contender, Moved, candidates, swept
from selfspec.eval.options import BenchOptions, RecordOptions, TuneOptions
from selfspec.eval.record import record
from selfspec.eval.report import seconds_by_prompt
from selfspec.eval.results import (
    ANSWERS,
    SIX_TASKS,
    Answer,
    Question,
    SpeedUp,
    failures,
    load_suite,
    speed_up,
    spread,
)
from selfspec.eval.tune import Tuned, tune
from selfspec.files import write
from selfspec.options.text import word

TAUS = (0.2, 0.35, 0.5, 0.65, 0.8, 0.95)
WIDTHS = (1, 2, 3, 5, 7)

Seconds = Mapping[str, float]
"""By question."""


def main(
    output: Annotated[Path, typer.Option(help="Results folder.")],
    model: str | None = None,
    heads: str | None = None,
    dtype: str = "bfloat16",
    suite: str = SIX_TASKS,
    limit: Annotated[int, typer.Option(help="Questions to time, spread over the suite.")] = 12,
    tune_limit: Annotated[int, typer.Option(help="Others to tune on.")] = 12,
    new_tokens: int = 64,
    points: Annotated[int, typer.Option(help="Settings of the grid.")] = 30,
    repeats: int = 1,
    seed: int = 0,
) -> None:
    """Tune, run, compare."""
    report.check_results(output, overwrite=False, resume=False)
    speculator = selfspec.load(model, heads=heads, dtype=dtype)
    if speculator.heads is None:
        raise HeadsNotFound("without exit heads there is nothing to tune. Give --heads")
    whole = load_suite(suite)
    tuning = spread(whole, tune_limit)
    timed = spread([question for question in whole if question not in tuning], limit)
    tuned = tuned_on(speculator, tuning, new_tokens)
    settings = grid(speculator, points, seed)
    options = BenchOptions(suite=suite, max_new_tokens=new_tokens, repeats=repeats, seed=seed)
    facts = {
        "command": command(),
        "tuned_on": [question.id for question in tuning],
        "options": asdict(options),
        "tuned": asdict(tuned),
        "machine": machine(),
    }
    report.begin_results(output, json.loads(json.dumps(facts)), resume=False)
    ways = contenders(speculator, tuned, settings)
    runner = Bench(speculator=speculator, options=options)
    with progress.bar("run", "questions") as show:
        answers = runner.measure(timed, ways, output / ANSWERS, show)
    if missing := failures(answers):
        raise SystemExit("\n".join(missing))
    labels = [way.label for way in ways[2:]]
    summary = compared(answers, labels, seed) | {"promised": tuned.speed_up}
    write(output / report.SUMMARY, json.dumps(summary, indent=2) + "\n")
    text = table(summary)
    write(output / "table.md", text)
    print(text)


def tuned_on(speculator: Speculator, questions: Sequence[Question], new_tokens: int) -> Tuned:
    """What `selfspec tune` would keep, with its own defaults."""
    assert speculator.heads is not None  # noqa: S101  # main has checked
    with progress.bar("record", "questions") as show:
        made = record(speculator, questions, RecordOptions(max_new_tokens=new_tokens), show)
    rows = made.info.max_draft_tokens + 1
    costs = measure(speculator.backbone, speculator.heads, rows=rows, context=made.mean_context)
    with progress.bar("replay", "settings") as show:
        return tune(made, costs, TuneOptions(), show)


def grid(speculator: Speculator, points: int, seed: int) -> list[dict[str, Any]]:
    """Each exit layer alone and all together, at all thresholds and widths; `points` by chance."""
    assert speculator.heads is not None  # noqa: S101  # main has checked
    fitted = tuple(speculator.heads.config.exit_layers)
    sets = dict.fromkeys([*((layer,) for layer in fitted), fitted])
    every = [
        {"drafter": f"exit:layers={word(layers)},threshold={tau},max_depth=none,max_tokens={width}"}
        for layers, tau, width in itertools.product(sets, TAUS, WIDTHS)
    ]
    return random.Random(seed).sample(every, min(points, len(every)))


def contenders(
    speculator: Speculator, tuned: Tuned, settings: Sequence[dict[str, Any]]
) -> list[Contender]:
    """Plain decoding, the tuned setting (no drafts where none pay), then the grid."""
    (plain,) = candidates(speculator, ["plain"])["plain"]
    own = tuned.options | {"never_slower": True}
    moves = [
        Moved("drafter", setting.get("drafter", "none"), setting) for setting in (own, *settings)
    ]
    chosen, *others = swept(speculator, moves)
    return [replace(plain, label="plain"), replace(chosen, label="tuned"), *others]


def compared(answers: Sequence[Answer], labels: Sequence[str], seed: int) -> dict[str, Any]:
    """The tuned setting against plain decoding and against the grid's best, found in both ways."""

    def seconds(label: str) -> Seconds:
        return seconds_by_prompt(answers, label, "plain")[0]

    points = {label: seconds(label) for label in labels}
    plain, tuned = seconds("plain"), seconds("tuned")
    best = min(points, key=lambda label: sum(points[label].values()))
    fair = searched(points)
    return {
        "prompts": len(plain),
        "points": len(points),
        "best": best,
        "tuned_over_plain": asdict(speed_up(plain, tuned, seed)),
        "best_over_plain": asdict(speed_up(plain, points[best], seed)),
        "tuned_over_best": asdict(speed_up(points[best], tuned, seed)),
        "searched_over_plain": asdict(speed_up(plain, fair, seed)),
        "tuned_over_searched": asdict(speed_up(fair, tuned, seed)),
    }


def searched(grid: Mapping[str, Seconds]) -> dict[str, float]:
    """Of each half of the prompts the seconds of the setting that is best on the other half."""
    prompts = list(next(iter(grid.values())))
    halves = prompts[::2], prompts[1::2] or prompts
    found: dict[str, float] = {}
    for half, other in (halves, halves[::-1]):
        best = min(grid.values(), key=lambda times: sum(times[prompt] for prompt in other))
        found |= {prompt: best[prompt] for prompt in half}
    return found


def table(summary: Mapping[str, Any]) -> str:
    """For people: ratios of total seconds with 95 % intervals over prompts."""
    names = {
        "tuned_over_plain": "the tuned setting, over plain decoding",
        "best_over_plain": f"the grid's best with hindsight ({summary['best']}), over plain",
        "searched_over_plain": "the grid's best, found on the other half, over plain",
        "tuned_over_best": "tuned, over the best with hindsight",
        "tuned_over_searched": "tuned, over the best found on the other half",
    }
    lines = ["| speed-up of | ratio | 95 % |", "|---|---|---|"]
    for key, name in names.items():
        gain = SpeedUp(**summary[key])
        lines.append(f"| {name} | {gain.ratio:.3f} | {gain.low:.3f} to {gain.high:.3f} |")
    lines.append(
        f"\n{summary['prompts']} prompts, {summary['points']} points of the grid; tune promised "
        f"{summary['promised']:.2f} behind the prompt's pass. To reach: tuned over the best at "
        "least 0.97, over plain decoding at least 0.98."
    )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    typer.run(main)
