r"""Rules that change the text, as their documents try them: CM-ASD, EASD, lenience.

    python -m eval.papers.lossy cm-asd --suite spec-bench --questions question_dev.jsonl \
        --output eval/results/papers/cm-asd
    selfspec calibrate --entropy --data validation.jsonl.gz --max-tokens 20000
    python -m eval.papers.lossy easd --draft-model draft-model --entropy-threshold 4.1 \
        --suite spec-bench --questions question_dev.jsonl --output eval/results/papers/easd
    python -m eval.papers.lossy lenience --draft-model draft-model \
        --output eval/results/papers/lenience

Against plain decoding and lossless speculation, measured as `selfspec bench` does and with its
tables: tokens per verification, speed-up, BLEU, ROUGE-L, edits and likelihood by task. The same
command goes on where it was stopped. Writes what `selfspec bench` does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer

from eval import lab
from selfspec.api.speculator import Speculator
from selfspec.errors import InvalidOption
from selfspec.eval import report
from selfspec.eval.bench import Contender, described
from selfspec.eval.report import Table, markdown, summarise
from selfspec.eval.results import (
    SIX_TASKS,
    Answer,
    BenchOptions,
    Question,
    check_packages,
)
from selfspec.files import write
from selfspec.options import READINGS

app = typer.Typer(pretty_exceptions_enable=False)

PLAIN, LOSSLESS = "plain", "lossless"

Summary = dict[str, Any]


def measured(
    output: Path,
    speculator: Speculator,
    questions: Sequence[Question],
    rules: Mapping[str, str],
    new_tokens: int,
    **drawn: Any,
) -> tuple[Summary, list[Answer]]:
    """`rules` by label, beside plain decoding and no rule; `drawn`: keywords of all."""
    check_packages("the quality of texts", "sacrebleu", "rouge_score")
    given: dict[str, dict[str, Any]] = {PLAIN: {"speculate": False}, LOSSLESS: {}}
    given |= {name: {"acceptance": rule} for name, rule in rules.items()}
    drafter = "ngram+exit" if speculator.runtime.draft_model is None else "draft-model"
    ways = [
        Contender(
            label=name,
            method=PLAIN if name == PLAIN else drafter,
            setting=drawn | setting,
            lossy=name in rules,
        )
        for name, setting in given.items()
    ]
    options = BenchOptions(max_new_tokens=new_tokens, quality=True)
    answers = lab.benched(output, speculator, questions, ways, options, settings=list(given))
    return summarise(answers, described(ways, {})), answers


def finish(output: Path, summary: Summary, more: Sequence[Table] = ()) -> None:
    text = "\n".join([report.write_results(output, summary), *map(markdown, more)])
    write(output / "table.md", text)
    print(text)


# --- CM-ASD ---------------------------------------------------------------------------------------


@app.command()
def cm_asd(
    output: lab.Output,
    draft_model: lab.DraftModel = None,
    dtype: str = "bfloat16",
    suite: lab.Suite = SIX_TASKS,
    questions: lab.Questions = None,
    limit: Annotated[int, typer.Option(help="Questions, spread over both tasks.")] = 16,
    tolerances: Annotated[str, typer.Option(help="tau_base in nats: X[,X..].")] = "0,0.1,0.5,1,2",
    longest_draft: Annotated[int, typer.Option(help="k_max.")] = 5,
    new_tokens: lab.NewTokens = 64,
) -> None:
    """Translations and summaries, in both readings, for several tolerances (tables I to V).

    Draft lengths by CM-ASD's controller in all rows but plain. Readings: "intent" is stricter where
    the drafter is unsure, "paper" (the formula as printed) is looser there.
    """
    controller = f"cm-asd:longest={longest_draft}"
    speculator = lab.drafting(draft_model, dtype, max_tokens=1, controller=controller)
    tasks = ("translation", "summary")
    asked = lab.first_turns(suite, questions, limit, *tasks)
    rules = {
        f"{reading}, tau_base {tau:g}": f"cm-asd:reading={reading},tolerance={tau:g}"
        for reading, tau in product(READINGS, lab.shares(tolerances))
    }
    summary, _ = measured(output, speculator, asked, rules, new_tokens)
    finish(output, summary)


# --- EASD -----------------------------------------------------------------------------------------

PAPER_OVERLAP = 0.8

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@app.command()
def easd(
    output: lab.Output,
    entropy_threshold: Annotated[float, typer.Option(help="tau_H as calibrated, in nats.")],
    draft_model: lab.DraftModel = None,
    dtype: str = "bfloat16",
    suite: lab.Suite = SIX_TASKS,
    questions: lab.Questions = None,
    limit: Annotated[int, typer.Option(help="Questions, spread over the suite's sums.")] = 20,
    entropies: Annotated[str, typer.Option(help="Other tau_H in nats: X[,X..].")] = "0.5,1,2,3",
    overlaps: Annotated[str, typer.Option(help="tau_O: X[,X..].")] = "0.2,0.4,0.6,0.8",
    max_draft_tokens: int = 2,
    new_tokens: lab.NewTokens = 160,
) -> None:
    """Answers to sums with known results, over tau_H and tau_O (tables 1, 5 and 6).

    A draft that stands where both models waver between the same tokens is refused, and the target's
    next best token is taken. That needs drafts where the drafter wavers, which a draft model makes
    and confident heads do not. The tau_O curve is taken at the calibrated and at the lowest tau_H,
    the tau_H curve at tau_O = 0.8 and at the lowest tau_O.
    """
    speculator = lab.drafting(draft_model, dtype, max_tokens=max_draft_tokens)
    asked = [
        question
        for question in lab.first_turns(suite, questions, limit, "math")
        if question.reference is not None and expected_number(question.reference) is not None
    ]
    taus = sorted({*lab.shares(entropies), entropy_threshold})
    shares = sorted({*lab.shares(overlaps), PAPER_OVERLAP})
    pairs = {(tau, share) for tau in taus for share in (PAPER_OVERLAP, shares[0])}
    pairs |= {(tau, share) for tau in (entropy_threshold, taus[0]) for share in shares}

    rules = {
        f"tau_H {tau:g}, tau_O {share:g}": f"easd:entropy={tau:g},overlap={share:g}"
        for tau, share in sorted(pairs)
    }
    summary, answers = measured(output, speculator, asked, rules, new_tokens)
    found = {name: numbers(answers, name) for name in summary["methods"]}
    summary |= {"calibrated_entropy_threshold": entropy_threshold, "numbers": found}
    shares_of = pd.DataFrame(found).T.map("{:.0%}".format).rename_axis("setting").reset_index()
    finish(output, summary, [Table("Answers to sums", shares_of)])


def numbers(answers: Sequence[Answer], name: str) -> dict[str, float]:
    """Shares of answers whose last number is the reference's, and is plain decoding's."""
    texts = [text for answer in answers if (text := answer.runs[name].quality) is not None]
    found = [final_number(text.text) for text in texts]
    right = [expected_number(text.reference or "") for text in texts]
    usual = [final_number(text.plain_text) for text in texts]
    return {
        "right": sum(a == b for a, b in zip(found, right, strict=True)) / len(found),
        "plain's": sum(a == b for a, b in zip(found, usual, strict=True)) / len(found),
    }


def final_number(text: str) -> float | None:
    """What a worked solution arrives at: its last number; None without any."""
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def expected_number(reference: str) -> float | None:
    """What a reference says: its first number, behind "####" where it has that; None without."""
    found = _NUMBER.findall(reference.rpartition("####")[2])
    return float(found[0].replace(",", "")) if found else None


# --- lenience -------------------------------------------------------------------------------------


@app.command()
def lenience(
    output: lab.Output,
    draft_model: Annotated[Path, typer.Option(help="Folder of a smaller model.")],
    dtype: str = "bfloat16",
    suite: lab.Suite = SIX_TASKS,
    questions: lab.Questions = None,
    limit: Annotated[int, typer.Option(help="Questions, spread over the suite.")] = 12,
    leniences: Annotated[str, typer.Option(help="l: X[,X..].")] = "1,0.8,0.6,0.4,0.2,0.1",
    temperature: float = 1.0,
    max_draft_tokens: int = 2,
    new_tokens: lab.NewTokens = 64,
    seed: int = 0,
) -> None:
    """Speed against divergence, live: a draft x stays when u < p(x) / (q(x) l).

    Share of drafts that stay, and how likely the model finds what was written.
    """
    steps = lab.shares(leniences)
    if 1.0 not in steps:
        raise InvalidOption("leniences hold no 1: there is nothing to compare with")
    speculator = lab.drafting(draft_model, dtype, max_tokens=max_draft_tokens)
    asked = lab.first_turns(suite, questions, limit)
    drawn = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0, "seed": seed}
    rules = {f"l = {value:g}": f"lenient:lenience={value:g}" for value in steps if value != 1.0}
    summary, _ = measured(output, speculator, asked, rules, new_tokens, **drawn)
    finish(output, summary)


if __name__ == "__main__":
    lab.run(app)
