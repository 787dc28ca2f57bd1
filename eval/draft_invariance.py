"""Whether drafts move any bit of any logit, on many real prompts and as users run it: no padding.

    python -m eval.draft_invariance --limit 12 --output eval/results/draft-invariance-bf16

Each prompt is decoded plainly, with the default drafts, and with drafts that fill every pass
whatever they are worth; the target logits of all committed tokens are compared as bits. First turns
only. Writes `summary.json` and `table.md`; exit code 1 where a bit differs. `selfspec verify` does
the same with more kinds of drafts, and more besides, on fewer prompts.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

import selfspec
from eval.called import command
from selfspec.api.speculator import Speculator
from selfspec.cli import progress
from selfspec.cli.env import machine
from selfspec.config import SpeculationOptions
from selfspec.eval.results import SIX_TASKS, Question, load_suite
from selfspec.eval.scripted import decode_recorded, greedy_request
from selfspec.eval.verify import Bits
from selfspec.files import write


def main(
    output: Annotated[Path, typer.Option(help="Results folder.")],
    model: str | None = None,
    heads: str | None = None,
    dtype: str = "bfloat16",
    suite: str = SIX_TASKS,
    questions: Annotated[Path | None, typer.Option(help="The suite's file.")] = None,
    limit: Annotated[int | None, typer.Option(help="Questions, spread over the suite.")] = None,
    new_tokens: int = 64,
) -> None:
    """Decode all prompts in every way and compare bits."""
    speculator = selfspec.load(model, heads=heads, dtype=dtype)
    if not speculator.backbone.claims.steady:
        raise SystemExit("here bits depend on the number of rows: only --pinned pads them equal")
    asked = load_suite(suite, questions, limit)
    found = {name: Bits() for name in ways(speculator.options)}
    with progress.bar("compare", "prompts") as show:
        for number, question in enumerate(asked):
            show(number, len(asked), "")
            compare(speculator, question, new_tokens, found)
        show(len(asked), len(asked), "")
    summary = {
        "command": command(),
        "machine": machine(),
        "dtype": dtype,
        "executor": speculator.backbone.executor_name,
        "prompts": len(asked),
        "new_tokens": new_tokens,
        "drafts": {name: asdict(bits) for name, bits in found.items()},
    }
    output.mkdir(parents=True, exist_ok=True)
    write(output / "summary.json", json.dumps(summary, indent=2) + "\n")
    heading = f"{len(asked)} prompts, {dtype}: target logits against plain decoding's, bit by bit"
    page = table(heading, "drafts", found)
    write(output / "table.md", page)
    print(page)
    if any(bits.differing for bits in found.values()):
        raise SystemExit(1)


def ways(options: SpeculationOptions) -> dict[str, SpeculationOptions]:
    """Plain decoding's rivals: as configured, and as bold as drafters can be."""
    bold = options.updated({"prices": "row=0", "exit": {"threshold": 1e-6, "max_tokens": 7}})
    return {"default": options, "bold": bold}


def compare(
    speculator: Speculator, question: Question, new_tokens: int, found: dict[str, Bits]
) -> None:
    """One prompt in all ways; a text that differs shows in its logits."""
    request = greedy_request(speculator, question.turns[0], new_tokens)
    undrafted = replace(speculator.options, speculate=False)
    text, expected = decode_recorded(speculator, request, undrafted)
    for name, options in ways(speculator.options).items():
        tokens, logits = decode_recorded(speculator, request, options)
        same = min(len(tokens), len(text))
        found[name].compare(f"{question.id} with {name} drafts", logits[:same], expected[:same])
        if tokens != text and not found[name].differing:
            raise SystemExit(f"{question.id}: another text from equal logits, with {name} drafts")


def table(heading: str, ways: str, found: dict[str, Bits]) -> str:
    """What was found, for people; `ways`: what the names of `found` are."""
    lines = [
        heading,
        "",
        f"| {ways} | positions | positions with any bit different |",
        "| --- | --- | --- |",
        *(f"| {name} | {bits.positions:,} | {bits.differing:,} |" for name, bits in found.items()),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    typer.run(main)
