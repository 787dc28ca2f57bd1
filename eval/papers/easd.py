r"""EASD's experiment: answers to sums with known results, over tau_H and tau_O.

    selfspec calibrate --entropy --data validation.jsonl.gz --max-tokens 20000
    python -m eval.papers.easd --draft-model draft-model --entropy-threshold 4.1 \
        --suite spec-bench --questions question_dev.jsonl --output eval/results/papers/easd

Against plain decoding and lossless speculation. The penalty needs drafts where the drafter wavers,
which a draft model makes and confident heads do not. `--entropy-threshold` is what the first
command prints; the tau_O curve is taken there and at the lowest tau_H, the tau_H curve at
tau_O = 0.8 and at the lowest tau_O. Writes `run.yaml`, `trials.jsonl`, `prices.json`,
`summary.json`, `table.md` and `easd.png`; goes on where it was stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from eval.papers import lossy, shared, trials
from selfspec.eval.report import Table
from selfspec.eval.results import SIX_TASKS, Question, expected_number, final_number
from selfspec.options import Easd

NOTE = """\
# EASD: speed and right answers

Greedy: a draft that stands where both models waver between the same tokens is refused, and the
target's next best token is taken. Right: the answer's last number is the reference's. Plain's
number: it is the one that plain decoding arrives at. Predicted: rounds priced by parts measured on
this machine; timed: wall time behind the prompt's pass; both per token, over plain decoding. Nats:
the model's own log-likelihood per token.
"""

PAPER_OVERLAP = 0.8


def main(
    output: Annotated[Path, typer.Option(help="Results folder.")],
    entropy_threshold: Annotated[float, typer.Option(help="tau_H as calibrated, in nats.")],
    draft_model: Path | None = None,
    dtype: str = "bfloat16",
    suite: str = SIX_TASKS,
    questions: Path | None = None,
    limit: Annotated[int, typer.Option(help="Questions, spread over the suite's sums.")] = 20,
    entropies: Annotated[str, typer.Option(help="Other tau_H in nats: X[,X..].")] = "0.5,1,2,3",
    overlaps: Annotated[str, typer.Option(help="tau_O: X[,X..].")] = "0.2,0.4,0.6,0.8",
    max_draft_tokens: int = 2,
    new_tokens: int = 160,
) -> None:
    """Decode, compare, write."""
    speculator = shared.load(draft_model, dtype, max_tokens=max_draft_tokens)
    asked = [
        question
        for question in shared.first_turns(suite, questions, limit, "math")
        if question.reference is not None and expected_number(question.reference) is not None
    ]
    shared.begin(output, speculator)
    prices = shared.priced(output, speculator, max_draft_tokens)
    taus = sorted({*(float(tau) for tau in entropies.split(",")), entropy_threshold})
    shares = sorted({*(float(share) for share in overlaps.split(",")), PAPER_OVERLAP})
    settings = lossy.baselines(new_tokens) | {
        label(tau, share): {
            **lossy.greedy(new_tokens),
            "acceptance": Easd(entropy=tau, overlap=share),
        }
        for tau, share in grid(taus, shares, entropy_threshold)
    }
    with shared.progress("EASD") as show:
        found = trials.run(speculator, asked, settings, output / trials.TRIALS, show)
    summary = lossy.figures(speculator, asked, found, list(settings), prices)
    for name, group in trials.by_label(found, list(settings)).items():
        summary[name] |= answers(asked, group, [t for t in found if t.label == lossy.PLAIN])
    shared.finish(
        output,
        NOTE,
        {"settings": summary, "calibrated_entropy_threshold": entropy_threshold},
        [table(summary)],
    )
    save_figure(summary, taus, shares, output / "easd.png")


def grid(
    taus: Sequence[float], shares: Sequence[float], calibrated: float
) -> list[tuple[float, float]]:
    """(tau_H, tau_O) on two curves each."""
    curves = [(tau, share) for tau in taus for share in (PAPER_OVERLAP, shares[0])]
    curves += [(tau, share) for tau in (calibrated, taus[0]) for share in shares]
    return sorted(set(curves))


def label(tau: float, share: float) -> str:
    """Of one setting."""
    return f"tau_H {tau:g}, tau_O {share:g}"


def answers(
    questions: Sequence[Question],
    group: Sequence[trials.Trial],
    plain: Sequence[trials.Trial],
) -> dict[str, Any]:
    """Shares of answers with the right number, and with plain decoding's."""
    expected = {question.id: expected_number(question.reference or "") for question in questions}
    usual = {trial.id: final_number(trial.text) for trial in plain}
    numbers = {trial.id: final_number(trial.text) for trial in group}
    return {
        "accuracy": sum(numbers[name] == expected[name] for name in numbers) / len(numbers),
        "same_number": sum(numbers[name] == usual[name] for name in numbers) / len(numbers),
    }


def table(summary: dict[str, Any]) -> Table:
    """All settings."""
    columns = ("accuracy", "same_number", "exact_share", "edits_per_token", "nats_per_token")
    return lossy.quality_table(f"math: {lossy.told(summary)}", summary, columns)


def save_figure(
    summary: dict[str, Any], taus: Sequence[float], shares: Sequence[float], path: Path
) -> None:
    """Edits and right answers along tau_H (at two tau_O) and along tau_O (at the lowest tau_H)."""
    wanted = (
        ("edits_per_token", "edits per token"),
        ("compression_rate", "tokens per verification"),
        ("accuracy", "share of right answers"),
    )
    figure, axes = shared.panels(2 * len(wanted))
    for index, (name, words) in enumerate(wanted):
        by_tau: shared.Lines = {
            f"tau_O = {share:g}": (taus, [summary[label(tau, share)][name] for tau in taus])
            for share in (PAPER_OVERLAP, shares[0])
        }
        by_share: shared.Lines = {
            f"tau_H = {taus[0]:g}": (
                shares,
                [summary[label(taus[0], share)][name] for share in shares],
            )
        }
        shared.draw(axes[2 * index], by_tau, words, "tau_H, nats", words)
        shared.draw(axes[2 * index + 1], by_share, words, "tau_O", words)
        for panel in axes[2 * index : 2 * index + 2]:
            panel.axhline(summary[lossy.PLAIN][name], color="grey", linewidth=0.8)
    shared.save(figure, path)


if __name__ == "__main__":
    shared.one_line(main)
