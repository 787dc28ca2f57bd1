"""One row, one result: logits of real texts, however a text arrives at the model.

    python -m eval.one_row --limit 20 --output eval/results/one-row-bf16

Each text, a prompt and its greedy answer, is read in one pass, and then in pieces, token by token,
among drafts that are taken back, as a branch of a tree, behind a half that stayed from an earlier
turn, on one thread and on two. All logits of all positions are compared as bits with those of the
one pass. Writes `summary.json` and `table.md`; exit code 1 where a bit differs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Annotated

import torch
import typer

from eval import lab
from eval.draft_invariance import finish
from selfspec.api.speculator import Speculator
from selfspec.decoding.probe import PassShape, any_split
from selfspec.eval.results import SIX_TASKS, Question, load_suite
from selfspec.eval.scripted import greedy_request
from selfspec.eval.verify import WAYS, Bits, logits_of


def main(
    output: lab.Output,
    model: lab.Model = None,
    dtype: str = "bfloat16",
    executor: str = "auto",
    suite: lab.Suite = SIX_TASKS,
    questions: lab.Questions = None,
    limit: lab.Limit = None,
    new_tokens: lab.NewTokens = 32,
    most_tokens: Annotated[int, typer.Option(help="Of a text; what is longer is cut.")] = 600,
) -> None:
    """Read all texts in every way and compare bits."""
    speculator = lab.loaded(model, dtype=dtype, executor=executor)
    name = speculator.backbone.executor_name
    if not any_split(speculator.backbone, PassShape()):
        raise SystemExit(f"the {name} executor does not claim it: bits depend on how rows are cut")
    asked = load_suite(suite, questions, limit)
    found = {way: Bits() for way in WAYS}
    hashes = {
        question.id: compare(speculator, question, new_tokens, most_tokens, found)
        for question in lab.each(asked, "compare", "texts")
    }
    title = f"{len(asked)} texts, {dtype}, {name}: logits against those of one pass over the text, "
    about = {"dtype": dtype, "executor": name, "sha256_of_logits": hashes}
    finish(output, about, f"{title}bit by bit", "the text arrives", found)


def compare(
    speculator: Speculator,
    question: Question,
    new_tokens: int,
    most_tokens: int,
    found: Mapping[str, Bits],
) -> str:
    """One text in all ways; returns a hash of its logits."""
    prompt = greedy_request(speculator, question.turns[0], new_tokens).only().ids[0]
    answer = speculator.generate(prompt[None], max_new_tokens=new_tokens, speculate=False)
    ids = torch.cat([prompt, torch.tensor(answer.token_ids, dtype=prompt.dtype)])[:most_tokens]
    expected = logits_of(speculator.backbone, ids)
    for name, way in WAYS.items():
        bits = logits_of(speculator.backbone, ids, way)
        found[name].compare(f"{question.id}, {name}", bits, expected)
    return hashlib.sha256(expected.numpy().tobytes()).hexdigest()


if __name__ == "__main__":
    lab.run(main)
