"""What a bench found: its answers come in, every figure of the report goes out, ready for JSON.

A method is compared on the answers that it and the other one wrote; prompts are the units of the
intervals. Called by `selfspec bench`; `tables` and `plots` read the result.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from selfspec.eval import metrics, quality
from selfspec.eval.answers import Answer, Run, failures
from selfspec.eval.suites import OVERALL, TASKS

BASES = ("plain", "hugging-face")
"""What speed-ups are over, where they were measured."""

ALL, WITHOUT_LOOPS = "all", "without_loops"


def summarise(
    answers: Sequence[Answer],
    methods: Mapping[str, Mapping[str, Any]],
    seed: int = 0,
    memory: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """All figures of `methods`, which are described by label; `seed` is the bootstrap's.

    `memory` is what `Bench.memory` found.
    """
    labels = list(methods)
    measured = [answer for answer in answers if answer.error is None]
    straight = [answer for answer in measured if answer.repeated <= metrics.LOOPING]
    return {
        "methods": methods,
        "questions": len({answer.id for answer in measured}),
        "answers": len(measured),
        "answers_without_loops": len(straight),
        "new_tokens": sum(answer.new_tokens for answer in measured),
        "loop_share": {
            task: share([answer.repeated > metrics.LOOPING for answer in group])
            for task, group in by_task(measured).items()
        },
        ALL: _groups(measured, labels, seed),
        WITHOUT_LOOPS: _groups(straight, labels, seed),
        "latency": {label: latency(_runs(measured, label)) for label in labels},
        "acceptance": {label: _acceptance(_runs(measured, label)) for label in labels},
        "parts_s": {label: parts(_runs(measured, label)) for label in labels},
        "unequal": {
            label: sum(not run.equal for run in _runs(measured, label)) for label in labels
        },
        "quality": {
            label: found for label in labels if (found := _quality_by_task(measured, label))
        },
        "harness": _harness(measured),
        "memory": memory,
        "failures": failures(answers),
    }


def by_task(answers: Iterable[Answer]) -> dict[str, list[Answer]]:
    """Spec-Bench's six groups in their order, then other words, then all together."""
    found: dict[str, list[Answer]] = defaultdict(list)
    for answer in answers:
        found[answer.task].append(answer)
        found[OVERALL].append(answer)
    order = [*TASKS, *(task for task in found if task not in (*TASKS, OVERALL)), OVERALL]
    return {task: found[task] for task in order if task in found}


def share(flags: Sequence[bool]) -> float:
    """Of true ones, 0..1."""
    return sum(flags) / len(flags) if flags else 0.0


def seconds_by_prompt(
    answers: Iterable[Answer], first: str, second: str
) -> tuple[dict[str, float], dict[str, float]]:
    """Wall seconds by question of two methods, over the answers that both wrote."""
    one: Counter[str] = Counter()
    other: Counter[str] = Counter()
    for answer in answers:
        pair = answer.runs.get(first), answer.runs.get(second)
        if all(run is not None and run.error is None for run in pair):
            for total, run in zip((one, other), pair, strict=True):
                total[answer.id] += run.seconds  # type: ignore[assignment, union-attr]  # seconds; both are there
    return dict(one), dict(other)


def latency(runs: Sequence[Run]) -> dict[str, float]:
    """What a user waits for, in seconds; empty without runs."""
    if not runs:
        return {}
    tokens = [seconds for run in runs for seconds in metrics.token_seconds(run.arrivals)]
    total = sum(run.seconds for run in runs)
    return {
        "first_token_s": sum(run.arrivals[0][1] for run in runs) / len(runs),
        "token_mean_s": sum(tokens) / len(tokens) if tokens else 0.0,
        "token_p50_s": metrics.percentile(tokens, 0.5) if tokens else 0.0,
        "token_p95_s": metrics.percentile(tokens, 0.95) if tokens else 0.0,
        "tokens_per_s": sum(count for run in runs for count, _ in run.arrivals) / total,
        "answer_s": total / len(runs),
    }


def parts(runs: Iterable[Run]) -> dict[str, float]:
    """Seconds by part of a round, summed."""
    total: Counter[str] = Counter()
    for run in runs:
        total.update(run.counts.get("seconds", {}))
    return dict(total)


def _runs(answers: Iterable[Answer], label: str) -> list[Run]:
    """The runs of one method that gave an answer."""
    found = [answer.runs[label] for answer in answers if label in answer.runs]
    return [run for run in found if run.error is None]


def _groups(
    answers: Sequence[Answer], labels: Sequence[str], seed: int
) -> dict[str, dict[str, dict[str, Any]]]:
    """Figures by task and method."""
    return {
        task: {label: _figures(group, label, seed) for label in labels}
        for task, group in by_task(answers).items()
    }


def _figures(answers: Sequence[Answer], label: str, seed: int) -> dict[str, Any]:
    """Of one method on one group. A speed-up is None where its base, or the method, wrote none."""
    runs = _runs(answers, label)
    kept = _acceptance(runs)["by_index"].values()
    drafted, accepted = (sum(pair[at] for pair in kept) for at in (0, 1))
    found: dict[str, Any] = {
        "answers": len(runs),
        "compression_rate": metrics.compression_rate(run.arrivals for run in runs),
        "acceptance_rate": accepted / drafted if drafted else None,
    }
    for base in BASES:
        below, above = seconds_by_prompt(answers, label, base)
        gain = dataclasses.asdict(metrics.speed_up(above, below, seed)) if above else None
        found[f"over_{base}"] = gain
    return found


def _quality_by_task(answers: Sequence[Answer], label: str) -> dict[str, dict[str, Any]]:
    """Of the texts of one method, where they were looked at."""
    found = {}
    for task, group in by_task(answers).items():
        texts = [run.quality for run in _runs(group, label) if run.quality is not None]
        if texts:
            found[task] = quality.summary(texts)
    return found


def _harness(answers: Sequence[Answer]) -> dict[str, float]:
    """Seconds in the methods' calls and around them, of answers that all methods wrote."""
    whole = [a for a in answers if all(run.error is None for run in a.runs.values())]
    inside = sum(run.seconds for answer in whole for run in answer.runs.values())
    outside = sum(answer.outside_s for answer in whole)
    return {
        "methods_s": inside,
        "outside_s": outside,
        "share": outside / inside if inside else 0.0,
    }


def _acceptance(runs: Sequence[Run]) -> dict[str, dict[str, list[int]]]:
    """Drafted and accepted by exit layer and by draft index; keys as JSON has them."""
    found = {}
    for kind in ("layer", "index"):
        drafted = [run.counts.get(f"drafted_by_{kind}", {}) for run in runs]
        accepted = [run.counts.get(f"accepted_by_{kind}", {}) for run in runs]
        pairs = metrics.acceptance(drafted, accepted)
        found[f"by_{kind}"] = {str(key): list(pair) for key, pair in pairs.items()}
    return found
