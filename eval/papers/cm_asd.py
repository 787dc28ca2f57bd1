r"""CM-ASD's experiment: speed and quality of translations and summaries, for several tolerances.

    python -m eval.papers.cm_asd --suite spec-bench --questions question_dev.jsonl \
        --output eval/results/papers/cm-asd

Beside plain decoding and lossless speculation with the same draft lengths, CM-ASD's verification in
both readings and with several tau_base (`--tolerances`). Drafts come from the heads of the default
model, or with `--draft-model` from a second one. BLEU is sacreBLEU's, with case; relative BLEU is
against plain decoding's text (the document's table V). Writes `run.yaml`, `trials.jsonl`,
`prices.json`, `summary.json`, `table.md` and `cm-asd.png`; goes on where it was stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from eval.papers import lossy, shared, trials
from selfspec.eval.results import SIX_TASKS
from selfspec.options.rules import READINGS, CmAsd

NOTE = """\
# CM-ASD: speed against quality

Greedy. Draft lengths by CM-ASD's controller in all rows but plain. CR: tokens per verification.
Predicted: rounds priced by parts measured on this machine; timed: wall time behind the prompt's
pass; both per token, over plain decoding. BLEU and ROUGE-L against the references; relative BLEU
against plain decoding's text; nats: the model's own log-likelihood per token. Readings: "intent" is
stricter where the drafter is unsure, "paper" (the formula as printed) is looser there.
"""

TASKS = ("translation", "summary")


def main(
    output: Annotated[Path, typer.Option(help="Results folder.")],
    draft_model: Path | None = None,
    dtype: str = "bfloat16",
    suite: str = SIX_TASKS,
    questions: Path | None = None,
    limit: Annotated[int, typer.Option(help="Questions, spread over both tasks.")] = 16,
    tolerances: Annotated[str, typer.Option(help="tau_base in nats: X[,X..].")] = "0,0.1,0.5,1,2",
    longest_draft: Annotated[int, typer.Option(help="k_max.")] = 5,
    new_tokens: int = 64,
) -> None:
    """Decode, compare, write."""
    speculator = shared.load(
        draft_model, dtype, max_tokens=1, controller=f"cm-asd:longest={longest_draft}"
    )
    asked = shared.first_turns(suite, questions, limit, *TASKS)
    shared.begin(output, speculator)
    prices = shared.priced(output, speculator, longest_draft)
    taus = [float(tau) for tau in tolerances.split(",")]
    settings = lossy.baselines(new_tokens) | {
        label(reading, tau): {
            **lossy.greedy(new_tokens),
            "acceptance": CmAsd(reading=reading, tolerance=tau),
        }
        for reading in READINGS
        for tau in taus
    }
    with shared.progress("CM-ASD") as show:
        found = trials.run(speculator, asked, settings, output / trials.TRIALS, show)
    summary: dict[str, Any] = {}
    for task in TASKS:
        own = [question for question in asked if question.task == task]
        summary[task] = lossy.figures(speculator, own, found, list(settings), prices)
    made = [
        lossy.quality_table(f"{task}: {lossy.told(summary[task])}", summary[task], COLUMNS)
        for task in TASKS
    ]
    shared.finish(output, NOTE, summary, made)
    save_figure(summary, taus, output / "cm-asd.png")


COLUMNS = ("bleu", "rouge_l", "relative_bleu", "edits_per_token", "nats_per_token")


def label(reading: str, tau: float) -> str:
    """Of one setting."""
    return f"{reading}, tau_base {tau:g}"


def save_figure(summary: dict[str, Any], taus: Sequence[float], path: Path) -> None:
    """CR and relative BLEU by tau_base, a panel per task and figure."""
    wanted = (("compression_rate", "tokens per verification"), ("relative_bleu", "relative BLEU"))
    figure, axes = shared.panels(len(TASKS) * len(wanted))
    places = [(task, *pair) for task in TASKS for pair in wanted]
    for panel, (task, name, words) in zip(axes, places, strict=True):
        lines: shared.Lines = {
            reading: (taus, [summary[task][label(reading, tau)][name] for tau in taus])
            for reading in READINGS
        }
        shared.draw(panel, lines, task, "tau_base, nats", words)
        panel.axhline(summary[task][lossy.LOSSLESS][name], color="grey", linewidth=0.8)
    shared.save(figure, path)


if __name__ == "__main__":
    shared.one_line(main)
