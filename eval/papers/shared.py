"""What the experiments share: the model with its drafter, first turns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

import selfspec
from selfspec.eval.results import Question, load_suite, spread

DraftModel = Annotated[Path | None, typer.Option(help="Folder of a smaller model.")]


def load(
    draft_model: Path | None, dtype: str, *, max_tokens: int = 6, controller: str = "fixed"
) -> selfspec.Speculator:
    """The default model with a draft model, or without one with the heads that come with it.

    These are asked to draft whatever they think: how many is up to W_max and the controller.
    """
    options: dict[str, Any] = {"dtype": dtype, "never_slower": False, "controller": controller}
    if draft_model is not None:
        drafter = f"draft-model:max_tokens={max_tokens}"
        return selfspec.load(draft_model=draft_model, drafter=drafter, **options)
    return selfspec.load(drafter=f"ngram+exit:threshold=1e-6,max_tokens={max_tokens}", **options)


def first_turns(suite: str, questions: Path | None, limit: int, *tasks: str) -> list[Question]:
    """Questions of some tasks (all without a name), first turns only: later ones need answers.

    A reference is one for the last turn, so it goes where that is cut.
    """
    every = [q for q in load_suite(suite, questions) if not tasks or q.task in tasks]
    return [
        replace(q, turns=q.turns[:1], reference=q.reference if len(q.turns) == 1 else None)
        for q in spread(every, limit)
    ]
