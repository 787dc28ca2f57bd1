"""One row, one result: logits of real texts, however a text arrives at the model.

    python -m eval.one_row --limit 20 --output eval/results/one-row-bf16

Each text, a prompt and its greedy answer, is read in one pass, and then in pieces, token by token,
among drafts that are taken back, as a branch of a tree, behind a half that stayed from an earlier
turn, on one thread and on two. All logits of all positions are compared as bits with those of the
one pass. Writes `summary.json` and `table.md`; exit code 1 where a bit differs.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer

import selfspec
from eval.called import command
from eval.draft_invariance import table
from selfspec.api.speculator import Speculator
from selfspec.cli import progress
from selfspec.cli.env import machine
from selfspec.decoding.probe import PassShape, any_split
from selfspec.eval.results import SIX_TASKS, Question, load_suite
from selfspec.eval.scripted import greedy_request
from selfspec.eval.verify import WAYS, Bits, logits_of
from selfspec.files import write


def main(
    output: Annotated[Path, typer.Option(help="Results folder.")],
    model: str | None = None,
    dtype: str = "bfloat16",
    executor: str = "auto",
    suite: str = SIX_TASKS,
    questions: Annotated[Path | None, typer.Option(help="The suite's file.")] = None,
    limit: Annotated[int | None, typer.Option(help="Questions, spread over the suite.")] = None,
    new_tokens: int = 32,
    most_tokens: Annotated[int, typer.Option(help="Of a text; what is longer is cut.")] = 600,
) -> None:
    """Read all texts in every way and compare bits."""
    speculator = selfspec.load(model, dtype=dtype, executor=executor)
    name = speculator.backbone.executor_name
    if not any_split(speculator.backbone, PassShape()):
        raise SystemExit(f"the {name} executor does not claim it: bits depend on how rows are cut")
    asked = load_suite(suite, questions, limit)
    found = {way: Bits() for way in WAYS}
    hashes = {}
    with progress.bar("compare", "texts") as show:
        for number, question in enumerate(asked):
            show(number, len(asked), "")
            hashes[question.id] = compare(speculator, question, new_tokens, most_tokens, found)
        show(len(asked), len(asked), "")
    summary = {
        "command": command(),
        "machine": machine(),
        "dtype": dtype,
        "executor": name,
        "ways": {way: asdict(bits) for way, bits in found.items()},
        "sha256_of_logits": hashes,
    }
    output.mkdir(parents=True, exist_ok=True)
    write(output / "summary.json", json.dumps(summary, indent=2) + "\n")
    what = f"{len(asked)} texts, {dtype}, {name}"
    heading = f"{what}: logits against those of one pass over the text, bit by bit"
    page = table(heading, "the text arrives", found)
    write(output / "table.md", page)
    print(page, end="")
    if any(bits.differing for bits in found.values()):
        raise SystemExit(1)


def compare(
    speculator: Speculator,
    question: Question,
    new_tokens: int,
    most_tokens: int,
    found: dict[str, Bits],
) -> str:
    """One text in all ways; returns a hash of its logits."""
    prompt = greedy_request(speculator, question.turns[0], new_tokens).only().ids[0]
    answer = speculator.generate(prompt[None], max_new_tokens=new_tokens, speculate=False)
    ids = torch.cat([prompt, torch.tensor(answer.token_ids, dtype=prompt.dtype)])[:most_tokens]
    expected = logits_of(speculator.backbone, ids)
    for name, way in WAYS.items():
        found[name].compare(
            f"{question.id}, {name}", logits_of(speculator.backbone, ids, way), expected
        )
    return hashlib.sha256(expected.numpy().tobytes()).hexdigest()


if __name__ == "__main__":
    typer.run(main)
