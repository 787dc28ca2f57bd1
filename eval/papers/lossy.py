"""Figures that the experiments with lossy rules share: speed, and what became of the text."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from eval.papers import prices, trials
from eval.papers.prices import Prices
from selfspec.api.speculator import Speculator
from selfspec.eval import results
from selfspec.eval.report import Table
from selfspec.eval.results import Question
from selfspec.eval.verify import log_likelihood

PLAIN, LOSSLESS = "plain", "lossless"

_SPEED = ("compression_rate", "acceptance_rate", "predicted_speed_up", "timed_speed_up")

_FORMATS = {
    "compression_rate": ("CR", "{:.2f}"),
    "acceptance_rate": ("accepted", "{:.0%}"),
    "predicted_speed_up": ("predicted", "{:.2f}×"),
    "timed_speed_up": ("timed", "{:.2f}×"),
    "bleu": ("BLEU", "{:.1f}"),
    "rouge_l": ("ROUGE-L", "{:.3f}"),
    "relative_bleu": ("relative BLEU", "{:.1f}"),
    "edits_per_token": ("edits per token", "{:.2f}"),
    "nats_per_token": ("nats per token", "{:.3f}"),
    "exact_share": ("texts of plain", "{:.0%}"),
    "accuracy": ("right", "{:.0%}"),
    "same_number": ("plain's number", "{:.0%}"),
    "first_choices": ("first choices", "{:.0%}"),
}
"""Of a figure: its column, and how it is written."""


def greedy(new_tokens: int) -> dict[str, Any]:
    """Keywords of every greedy setting."""
    return {"max_new_tokens": new_tokens, "do_sample": False}


def baselines(new_tokens: int) -> dict[str, dict[str, Any]]:
    """What lossy rules are compared with."""
    return {
        PLAIN: {**greedy(new_tokens), "speculate": False},
        LOSSLESS: greedy(new_tokens),
    }


def figures(
    speculator: Speculator,
    questions: Sequence[Question],
    found: Sequence[trials.Trial],
    labels: Sequence[str],
    cost: Prices,
) -> dict[str, dict[str, Any]]:
    """Speed and quality of every setting over some questions; plain decoding is the first label."""
    by_id = {question.id: question for question in questions}
    own = trials.by_label([trial for trial in found if trial.id in by_id], labels)
    plain = {trial.id: trial for trial in own[PLAIN]}
    likelihoods = _Likelihoods(speculator)
    summary = {}
    for label, group in own.items():
        records = [
            results.quality(
                _text(trial),
                _text(plain[trial.id]),
                by_id[trial.id].reference,
                functools.partial(likelihoods.nats, tuple(trial.prompt_ids)),
            )
            for trial in group
        ]
        summary[label] = {**speed(group, own[PLAIN], cost), **results.quality_summary(records)}
    return summary


def _text(trial: trials.Trial) -> results.Text:
    return results.Text(trial.token_ids, trial.text)


class _Likelihoods:
    """Nats of answers under the model; many settings write the same ones."""

    def __init__(self, speculator: Speculator) -> None:
        self._speculator = speculator
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...]], float] = {}

    @torch.inference_mode()
    def nats(self, prompt: tuple[int, ...], tokens: Sequence[int]) -> float:
        """Of `tokens` behind `prompt`."""
        key = prompt, tuple(tokens)
        if key not in self._known:
            ids = torch.tensor([prompt], device=self._speculator.backbone.device)
            self._known[key] = log_likelihood(self._speculator.model, ids, tokens)
        return self._known[key]


def speed(
    group: Sequence[trials.Trial], plain: Sequence[trials.Trial], cost: Prices
) -> dict[str, Any]:
    """Per token over plain decoding, because lossy texts have lengths of their own."""
    counts = prices.total(trial.counts for trial in group)
    plain_counts = prices.total(trial.counts for trial in plain)
    seconds = sum(trial.decode_s for trial in group)
    plain_seconds = sum(trial.decode_s for trial in plain)
    return {
        "lossless": all(trial.lossless for trial in group),
        "tokens": counts.tokens,
        "rounds": counts.rounds,
        "rows": counts.rows,
        "drafted": counts.drafted,
        "accepted": counts.accepted,
        "compression_rate": counts.tokens / counts.rounds,
        "acceptance_rate": counts.accepted / counts.drafted if counts.drafted else 0.0,
        "predicted_speed_up": cost.plain_seconds(counts.tokens) / cost.seconds(counts),
        "decode_s": seconds,
        "timed_speed_up": plain_seconds / plain_counts.tokens / (seconds / counts.tokens),
    }


def quality_table(
    title: str, summary: Mapping[str, Mapping[str, Any]], columns: Sequence[str]
) -> Table:
    """Settings down, speed and then `columns` across; no arithmetic here."""
    names = [*_SPEED, *columns]
    return Table(
        title,
        ["setting", *(_FORMATS[name][0] for name in names)],
        [
            [words(label, row), *(cell(name, row[name]) for name in names)]
            for label, row in summary.items()
        ],
    )


def words(label: str, row: Mapping[str, Any]) -> str:
    """A lossy setting says so."""
    return label if row["lossless"] else f"{label} (lossy)"


def cell(name: str, value: float | None) -> str:
    """As its column has it."""
    return "-" if value is None else _FORMATS[name][1].format(value)


def told(summary: Mapping[str, Mapping[str, Any]]) -> str:
    """How much text is behind a table."""
    row = summary[PLAIN]
    return f"questions: {row['answers']}, {row['tokens']:,} tokens of plain decoding"
