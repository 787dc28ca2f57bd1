"""`selfspec verify`: a model, heads and prompts in, a verdict on losslessness out."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from selfspec.cli import common, progress
from selfspec.cli.flags import Flag, merged, with_flags
from selfspec.cli.settings import LOADING, SPECULATION, Settings, picked

if TYPE_CHECKING:
    from selfspec.eval.verify import Rung, Subject

_PROMPTS, _NEW_TOKENS, _COPY_GB = 6, 48, 8.0

_OPTIONS = tuple(flag for flag in SPECULATION if flag.name != "pinned")
"""Bits are pinned where the ladder compares them."""

FLAGS = (
    *LOADING,
    *_OPTIONS,
    Flag("suite", str, "Prompts: six-tasks (the default), spec-bench, or a .jsonl file."),
    Flag("questions", str, "The file of a suite that is not built in."),
    Flag("limit", int, f"Prompts, spread evenly over the suite. Built in: {_PROMPTS}."),
    Flag("max_new_tokens", int, f"Tokens per prompt at most. Built in: {_NEW_TOKENS}."),
    Flag("skip_float64", bool, "Leave out rung 3, the slowest."),
    Flag("max_copy_gb", float, f"Largest float32 or float64 copy to make. Built in: {_COPY_GB}."),
)


@with_flags(*FLAGS)
def verify(
    *, config: common.ConfigFile = None, as_json: common.AsJson = False, flags: dict[str, Any]
) -> None:
    """Check that drafts change nothing here. Seven rungs; exit code 1 if one fails.

    Greedy decoding only; that samples keep their distribution is proved in the test suite.
    """
    asked = merged(config, flags, FLAGS)
    from selfspec.eval import verify as ladder
    from selfspec.eval.results import SIX_TASKS, load_suite
    from selfspec.model.quantised import keep_numbers

    file = asked.get("questions")
    questions = load_suite(
        asked.get("suite", SIX_TASKS), file and Path(file), asked.get("limit", _PROMPTS)
    )
    speculator = common.load(Settings(picked(asked, LOADING), picked(asked, _OPTIONS)))
    keep_numbers(speculator.model)  # it is compared with, and copied
    new_tokens = asked.get("max_new_tokens", _NEW_TOKENS)
    subject = ladder.Subject(
        speculator=speculator,
        cases=ladder.cases_of(speculator, questions, new_tokens),
        skip_float64=asked.get("skip_float64", False),
        max_copy_gb=asked.get("max_copy_gb", _COPY_GB),
    )
    rungs = climbed(subject)
    words = ladder.verdict(list(rungs.values()))
    passed = all(rung.outcome != "failed" for rung in rungs.values())
    if as_json:
        described = {
            "model": speculator.label,
            "prompts": len(questions),
            "max_new_tokens": new_tokens,
            "options": speculator.options.described(),
            "rungs": [{"claim": claim, **asdict(rung)} for claim, rung in rungs.items()],
            "passed": passed,
            "verdict": words,
        }
        common.emit(json.dumps(described) + "\n")
    else:
        common.emit(report(rungs) + f"\n{speculator.label}: {words}\n")
    if not passed:
        raise typer.Exit(1)


def climbed(subject: Subject) -> dict[str, Rung]:
    """All rungs by claim, with a bar while they are climbed."""
    from selfspec.eval.verify import RUNGS, climb

    rungs: dict[str, Rung] = {}
    each, done = len(subject.cases), 0
    with progress.bar("verify", "prompts") as show:

        def count() -> None:
            nonlocal done
            done += 1
            show(done, each * len(RUNGS), f"rung {len(rungs) + 1}")

        subject.tick = count
        for claim, rung in climb(subject):
            rungs[claim] = rung
            done = each * len(rungs)
            show(done, each * len(RUNGS), "")
    return rungs


def report(rungs: dict[str, Rung]) -> str:
    """For people."""
    return "".join(
        f"{number} {rung.outcome:<8} {claim}\n           {rung.found}\n"
        for number, (claim, rung) in enumerate(rungs.items(), start=1)
    )
