"""Whether drafts move any bit of any logit, on many real prompts and as users run it: no padding.

    python -m eval.draft_invariance --limit 12 --output eval/results/draft-invariance-bf16

Each prompt is decoded plainly, with the default drafts, and with drafts that fill every pass
whatever they are worth; the target logits of all committed tokens are compared as bits. First turns
only. Writes `summary.json` and `table.md`; exit code 1 where a bit differs. `selfspec verify` does
the same with more kinds of drafts, and more besides, on fewer prompts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from eval import lab
from selfspec.api.speculator import Speculator
from selfspec.config import SpeculationOptions
from selfspec.eval.results import SIX_TASKS, Question, load_suite
from selfspec.eval.scripted import decode_recorded, greedy_request
from selfspec.eval.verify import Bits


def main(
    output: lab.Output,
    model: lab.Model = None,
    heads: lab.Heads = None,
    dtype: str = "bfloat16",
    suite: lab.Suite = SIX_TASKS,
    questions: lab.Questions = None,
    limit: lab.Limit = None,
    new_tokens: lab.NewTokens = 64,
) -> None:
    """Decode all prompts in every way and compare bits."""
    speculator = lab.loaded(model, heads, dtype)
    if not speculator.backbone.claims.steady:
        raise SystemExit("here bits depend on the number of rows: only --pinned pads them equal")
    asked = load_suite(suite, questions, limit)
    # as configured, and as bold as drafters can be
    bold = {"prices": "row=0", "exit": {"threshold": 1e-6, "max_tokens": 7}}
    ways = {"default": speculator.options, "bold": speculator.options.updated(bold)}
    found = {name: Bits() for name in ways}
    for question in lab.each(asked, "compare", "prompts"):
        compare(speculator, question, new_tokens, ways, found)
    about = {
        "dtype": dtype,
        "executor": speculator.backbone.executor_name,
        "prompts": len(asked),
        "new_tokens": new_tokens,
    }
    title = f"{len(asked)} prompts, {dtype}: target logits against plain decoding's, bit by bit"
    finish(output, about, title, "drafts", found)


def compare(
    speculator: Speculator,
    question: Question,
    new_tokens: int,
    ways: Mapping[str, SpeculationOptions],
    found: Mapping[str, Bits],
) -> None:
    """One prompt in all ways; a text that differs shows in its logits."""
    request = greedy_request(speculator, question.turns[0], new_tokens)
    undrafted = replace(speculator.options, speculate=False)
    text, expected = decode_recorded(speculator, request, undrafted)
    for name, options in ways.items():
        tokens, logits = decode_recorded(speculator, request, options)
        same = min(len(tokens), len(text))
        found[name].compare(f"{question.id} with {name} drafts", logits[:same], expected[:same])
        if tokens != text and not found[name].differing:
            raise SystemExit(f"{question.id}: another text from equal logits, with {name} drafts")


def finish(
    output: Path, about: Mapping[str, Any], title: str, ways: str, found: Mapping[str, Bits]
) -> None:
    """Write; `ways`: what the names of `found` are. Exit code 1 where a bit differs."""
    header = (ways, "positions", "positions with any bit different")
    rows = [[name, f"{bits.positions:,}", f"{bits.differing:,}"] for name, bits in found.items()]
    summary = {**about, "ways": {name: asdict(bits) for name, bits in found.items()}}
    lab.finish(output, summary, f"{title}\n\n{lab.table(header, rows)}")
    if any(bits.differing for bits in found.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    lab.run(main)
