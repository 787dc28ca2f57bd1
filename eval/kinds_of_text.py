r"""How often heads are right on each kind of question, by the text that they were fitted to.

    selfspec data --from question_dev.jsonl --regenerate --max-new-tokens 96 --output answers.jsonl
    python -m eval.kinds_of_text --questions question_dev.jsonl --answers answers.jsonl \
        --heads old=heads/old --heads new=heads/new --output eval/results/heads/kinds

Heads of one kind that differ in nothing but their text are measured on the model's greedy answers
to questions that no head saw: the share of positions where the first choice is the model's, and
where one of the first four is. Writes `table.md` and `table.json`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import typer

import selfspec
from eval import lab
from selfspec.eval.results import load_suite
from selfspec.files import write
from selfspec.heads.exit_heads import ExitHeads
from selfspec.training.features import Features, FeatureSpec, StreamSource
from selfspec.training.measure import judged
from selfspec.training.text import Conversation, read_conversations

TOP = 4


def main(
    questions: Annotated[Path, typer.Option(help="Spec-Bench's questions.")],
    answers: Annotated[Path, typer.Option(help="The model's answers to them.")],
    heads: Annotated[list[str], typer.Option(help="NAME=FOLDER, several times.")],
    output: lab.Output,
) -> None:
    """Measure, write."""
    backbone = selfspec.load(dtype="bfloat16", executor="generic", heads="none").backbone
    loaded = {}
    for name, _, folder in (entry.partition("=") for entry in heads):
        named = backbone.unembedding, backbone.fingerprint, "the default model"
        loaded[name] = ExitHeads.from_pretrained(Path(folder), *named)
    by_kind = features_by_kind(backbone, questions, answers)
    rows = [
        {"text": name, "kind": kind, **agreement(fitted, batches)}
        for name, fitted in loaded.items()
        for kind, batches in by_kind.items()
    ]
    found = pd.DataFrame(rows)
    sums = found.drop(columns="kind").groupby("text", sort=False).sum().reset_index()
    found = pd.concat([sums.assign(kind="all"), found])
    output.mkdir(parents=True, exist_ok=True)
    write(output / "table.json", found.to_json(orient="records", indent=1) + "\n")
    write(output / "table.md", f"`{lab.command()}`\n\n{markdown(found)}")


def features_by_kind(backbone: Any, questions: Path, answers: Path) -> dict[str, list[Features]]:
    """Features of the answers, by the task of the question that they belong to."""
    kinds = {
        question.turns[0].strip(): question.task for question in load_suite("spec-bench", questions)
    }
    lines = [json.loads(line) for line in answers.read_text(encoding="utf-8").splitlines()]
    talks = read_conversations(answers, None, vocab_size=backbone.vocab_size, max_length=8192)
    groups: dict[str, list[Conversation]] = defaultdict(list)
    for line, talk in zip(lines, talks, strict=True):
        groups[kinds[line["messages"][0]["content"].strip()]].append(talk)
    spec = FeatureSpec((0,), deep=True, top_k=1)
    sources = {kind: StreamSource(backbone, spec, found, 8192) for kind, found in groups.items()}
    return {k: [s.batch(i) for i in range(len(s.sizes))] for k, s in sources.items()}


@torch.no_grad()
def agreement(heads: ExitHeads, batches: list[Features]) -> dict[str, int]:
    """Positions, and at how many of them the heads on the embedding are right."""
    counts = {"positions": 0, "first": 0, "among four": 0, "second": 0, "seconds": 0}
    for batch in batches:
        found, second = (judged(heads, 0, batch, second=later) for later in (False, True))
        tops = heads[0].to_target_ids(found.logits.topk(TOP).indices)
        wanted = batch.tensors()["top_ids"][batch.answers, :1]
        for name, value in (
            ("positions", len(found.right)),
            ("first", int(found.right.sum())),
            ("among four", int((tops == wanted).any(-1).sum())),
            ("seconds", len(second.right)),
            ("second", int(second.right.sum())),
        ):
            counts[name] += value
    return counts


def markdown(found: pd.DataFrame) -> str:
    """Percent by text and kind: first choice, second draft, among the first four."""
    parts = []
    for name, title, of in (
        ("first", "The first choice is right (%)", "positions"),
        ("second", "The second draft, behind a right first one (%)", "seconds"),
        ("among four", "The right token is among the first four (%)", "positions"),
    ):
        table = found.assign(share=100 * found[name] / found[of]).pivot_table(
            index="text", columns="kind", values="share", sort=False
        )
        parts.append(table.rename_axis(title).to_markdown(floatfmt=".1f") + "\n")
    sizes = found[found["text"] == found["text"].iloc[0]]
    counts = ", ".join(f"{k} {n:,}" for k, n in zip(sizes["kind"], sizes["positions"], strict=True))
    return "\n".join(parts) + f"\nPositions: {counts}.\n"


if __name__ == "__main__":
    lab.run(main)
