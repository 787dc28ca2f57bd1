r"""GammaTune's experiment: five controllers from twelve initial lengths each (its table 2).

    python -m eval.papers.gammatune --draft-model draft-model \
        --output eval/results/papers/gammatune

The drafter is a draft model, as in the document: its drafts cost time, so their number matters.
(Text already seen costs nothing to draft, and our n-gram drafter stops by its own reckoning.)
All settings write the same text. Their rounds are therefore exact and replayed from one drafting
of each text; `--timed` of the prompts are also run live, all settings in random order, and must
show the same rounds. Writes `run.yaml`, `replays.jsonl`, `answers.jsonl`, `prices.json`,
`summary.json`, `table.md` and `gammatune.png`; the same command goes on where it was stopped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from eval.papers import shared
from eval.papers.lengths import (
    CONTROLLERS,
    INITIAL_LENGTHS,
    SETTINGS,
    VARIANTS,
    Chains,
    Gain,
    Setting,
    gains,
    replayed,
)
from eval.papers.prices import Prices, RoundCounts, by_drafts, total
from selfspec import files
from selfspec.api.speculator import Speculator
from selfspec.api.text import encode
from selfspec.decoding.drafters import DraftCache
from selfspec.eval.bench import Bench
from selfspec.eval.methods import Contender
from selfspec.eval.options import BenchOptions
from selfspec.eval.report import Table
from selfspec.eval.results import ANSWERS, SIX_TASKS, Answer, Question, drop_unfinished, spread

NOTE = """\
# GammaTune's sweep of initial lengths

Gain: throughput over that of fixed lengths, both means over the twelve initial lengths, ± the
standard deviation over them. Worst: throughput from the worst initial length over the *best* fixed
length, known with hindsight; at least 95 % is wanted of GammaTune. Rounds, rows and drafts are
exact. "here": rounds priced by parts measured on this machine. "c": GammaTune's equation 6, a
verification costs c draft tokens, whatever its length. "timed": wall time behind the prompt's pass,
noisy where other jobs run on the machine. Controllers that adapt stay within 1 to 10 (gamma_max).
"""

PLAIN = "plain"

EVERY = SETTINGS + VARIANTS


def main(
    output: Annotated[Path, typer.Option(help="Results folder.")],
    draft_model: Annotated[Path, typer.Option(help="Folder of a smaller model.")],
    dtype: str = "bfloat16",
    suite: str = SIX_TASKS,
    questions: Path | None = None,
    limit: Annotated[int, typer.Option(help="Questions, spread over the suite.")] = 24,
    timed: Annotated[int, typer.Option(help="Of these, also run live.")] = 3,
    new_tokens: int = 48,
) -> None:
    """Replay, run, compare, write."""
    speculator = shared.load(draft_model, dtype)
    asked = shared.first_turns(suite, questions, limit)
    shared.begin(output, speculator)
    replays = replay(speculator, asked, output / "replays.jsonl", new_tokens)
    prices = shared.priced(output, speculator, max(INITIAL_LENGTHS))
    answers = run(speculator, spread(asked, timed), output / ANSWERS, new_tokens) if timed else []
    counts = {s: total(rounds[s] for rounds in replays.values()) for s in EVERY}
    by_measure = seconds(counts, prices, answers)
    plain = {"here": prices.plain_seconds(counts[SETTINGS[0]].tokens)}
    plain |= {f"c = {c}": counts[SETTINGS[0]].tokens for c in shared.STEP_COSTS}
    plain["timed"] = wall(answers, PLAIN)
    found = {name: gains({s: row[s] for s in SETTINGS}) for name, row in by_measure.items()}
    moved = {name: gains(row) for name, row in by_measure.items() if name != "timed"}
    summary = {
        "questions": len(replays),
        "tokens": counts[SETTINGS[0]].tokens,
        "timed_questions": len(answers),
        "timed_runs": len(SETTINGS) * len(answers),
        "timed_runs_with_replayed_rounds": agreeing(answers, replays),
        "measured_c": 1 / prices.draft_cost,
        "gains": {name: [asdict(gain) for gain in every] for name, every in found.items()},
        "sensitivity": {name: [asdict(gain) for gain in every] for name, every in moved.items()},
        "settings": [
            settings_row(s, counts[s], {name: plain[name] / by_measure[name][s] for name in found})
            for s in SETTINGS
        ],
    }
    made = [gains_table(told(summary), found, summary["measured_c"])]
    words = "Constants that the document does not print, one changed at a time"
    made.append(gains_table(words, moved, summary["measured_c"]))
    made.append(counts_table(summary["settings"]))
    shared.finish(output, NOTE, summary, made)
    save_figure(summary["settings"], output / "gammatune.png")


def replay(
    speculator: Speculator, questions: Sequence[Question], path: Path, new_tokens: int
) -> dict[str, dict[Setting, RoundCounts]]:
    """Rounds of every setting by question; what the file holds already is not done again."""
    drop_unfinished(path)
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found = {record["id"]: parsed(record["rounds"]) for record in map(json.loads, lines)}
    with shared.progress("replay") as show:
        for number, question in enumerate(questions):
            show(number, len(questions), question.id)
            if question.id in found:
                continue
            rounds = replayed_question(speculator, question, new_tokens)
            record = {s.label: asdict(rounds[s]) for s in EVERY}
            files.append(path, json.dumps({"id": question.id, "rounds": record}))
            found[question.id] = rounds
        show(len(questions), len(questions), "")
    return found


def replayed_question(
    speculator: Speculator, question: Question, new_tokens: int
) -> dict[Setting, RoundCounts]:
    """By plain decoding's text."""
    ids = encode(speculator.tokenizer, question.turns[0])
    asked: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": False}
    text = speculator.generate(ids, **asked, speculate=False).token_ids
    cache = DraftCache(speculator.draft_model, speculator.backbone.vocab_size)
    chains = Chains(cache, ids, text)
    return {s: replayed(chains, speculator.options.updated(s.options)) for s in EVERY}


def parsed(record: Mapping[str, Any]) -> dict[Setting, RoundCounts]:
    """As they were before JSON made words of numbers."""
    found = {}
    for setting in EVERY:
        counts = record[setting.label]
        drafts = {int(length): rounds for length, rounds in counts["by_drafts"].items()}
        found[setting] = RoundCounts(**{**counts, "by_drafts": drafts})
    return found


def run(
    speculator: Speculator, questions: Sequence[Question], path: Path, new_tokens: int
) -> list[Answer]:
    """All settings and plain decoding, live, as `selfspec bench` does it."""
    plain = Contender(label=PLAIN, method="plain", setting={"speculate": False})
    contenders = [
        Contender(label=s.label, method="draft-model", setting=s.options) for s in SETTINGS
    ]
    bench = Bench(speculator=speculator, options=BenchOptions(max_new_tokens=new_tokens))
    with shared.progress("timed") as show:
        return bench.measure(questions, [plain, *contenders], path, show)


def agreeing(
    answers: Sequence[Answer], replays: Mapping[str, Mapping[Setting, RoundCounts]]
) -> int:
    """Live runs with the very rounds of their replay."""
    right = 0
    for answer in answers:
        for setting in SETTINGS:
            live, expected = answer.runs[setting.label], replays[answer.id][setting]
            drafted = live.counts.get("drafted_by_index", {})
            by_index = {int(index): int(count) for index, count in drafted.items()}
            rounds = by_drafts(len(live.arrivals) - 1, by_index)
            right += live.equal and rounds == dict(expected.by_drafts)
    return right


def seconds(
    counts: Mapping[Setting, RoundCounts], prices: Prices, answers: Sequence[Answer]
) -> dict[str, dict[Setting, float]]:
    """By measure and setting: predicted here, by equation 6 in plain steps, and timed."""
    found = {"here": {s: prices.seconds(count) for s, count in counts.items()}}
    for c in shared.STEP_COSTS:
        found[f"c = {c}"] = {s: count.steps(1 / c) for s, count in counts.items()}
    if answers:
        found["timed"] = {s: wall(answers, s.label) for s in SETTINGS}
    return found


def wall(answers: Sequence[Answer], label: str) -> float:
    """Seconds behind the prompt's pass."""
    return sum(gap for answer in answers for _, gap in answer.runs[label].arrivals[1:])


def settings_row(
    setting: Setting, counts: RoundCounts, speed_ups: Mapping[str, float]
) -> dict[str, Any]:
    """Figures of one setting; speed-ups over plain decoding by measure."""
    return {
        "controller": setting.controller,
        "initial": setting.initial,
        "rounds": counts.rounds,
        "rows": counts.rows,
        "drafts": counts.drafted,
        "accepted": counts.accepted,
        "speed_up": dict(speed_ups),
    }


def told(summary: Mapping[str, Any]) -> str:
    """How much is behind the figures."""
    return (
        f"Questions: {summary['questions']}, {summary['tokens']:,} tokens; "
        f"of these timed: {summary['timed_questions']}, "
        f"{summary['timed_runs_with_replayed_rounds']} of {summary['timed_runs']} runs with "
        "exactly the replayed rounds"
    )


def gains_table(title: str, by_measure: Mapping[str, Sequence[Gain]], measured_c: float) -> Table:
    """Controllers down, measures across."""
    header = ["controller"]
    for name in by_measure:
        words = f"here (c = {measured_c:.1f})" if name == "here" else name
        header += [f"gain, {words}", "worst", "from"]
    rows = []
    for every in zip(*by_measure.values(), strict=True):
        cells = [every[0].controller]
        for gain in every:
            cells += [f"{gain.mean:.2f} ± {gain.spread:.2f}", f"{gain.worst:.0%}"]
            cells += [str(gain.worst_initial)]
        rows.append(cells)
    return Table(title, header, rows)


def counts_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Every setting; no arithmetic here."""
    header = ["controller", "initial", "rounds", "rows", "drafts", "accepted"]
    return Table(
        "Exact counts, and speed-up over plain decoding",
        header + list(rows[0]["speed_up"]),
        [
            [
                *(str(row[name]) for name in header[:2]),
                *(f"{row[name]:,}" for name in header[2:]),
                *(f"{value:.2f}×" for value in row["speed_up"].values()),
            ]
            for row in rows
        ],
    )


def save_figure(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Speed-up by initial length, a line per controller."""
    measures = rows[0]["speed_up"]
    figure, axes = shared.panels(len(measures))
    for panel, name in zip(axes, measures, strict=True):
        lines = {}
        for controller in CONTROLLERS:
            own = [row for row in rows if row["controller"] == controller]
            lines[controller] = (
                [row["initial"] for row in own],
                [row["speed_up"][name] for row in own],
            )
        shared.draw(panel, lines, name, "initial length", "speed-up over plain decoding")
    shared.save(figure, path)


if __name__ == "__main__":
    shared.one_line(main)
