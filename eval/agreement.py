r"""Measures how often heads are right, by kind of text and place in a round, on the same text.

    python -m eval.agreement --heads checkpoints/smollm2-135m-instruct --heads NEW \
        --suite spec-bench --questions question_dev.jsonl --output results/agreement

The model answers the suite greedily. A head is right where its draft is the model's own next token:
as the first draft of a round, or as the second and third after right drafts. Writes `summary.json`
and `table.md`.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import torch
import typer

from eval import lab
from selfspec.api.speculator import heads_of
from selfspec.cli.base import bar
from selfspec.eval.results import Question, load_suite
from selfspec.heads.exit_heads import ExitHeads
from selfspec.hub.models import load_model, resolve_heads, training_dtype
from selfspec.model import fingerprint
from selfspec.model.backbone import Backbone
from selfspec.training.features import FeatureSpec, Selection, StreamSource
from selfspec.training.fit import count_right
from selfspec.training.options import DataOptions
from selfspec.training.selfgen import Author, talk_of
from selfspec.training.text import Conversation, Counts, from_ids

DRAFTS, BATCH_TOKENS = 3, 2048
Right = dict[str, list[tuple[int, int]]]
"""By kind of text: counts of right and of all first, second and third drafts."""


def main(
    heads: Annotated[list[str], typer.Option(help="Folder or name; repeatable.")],
    output: lab.Output,
    model: lab.Model = None,
    suite: lab.Suite = "six-tasks",
    questions: lab.Questions = None,
    limit: lab.Limit = None,
    new_tokens: lab.NewTokens = 96,
) -> None:
    suite_questions = load_suite(suite, questions, limit)
    loaded, tokenizer, files = load_model(model, dtype=training_dtype(None))
    digest = fingerprint.of_loaded(loaded, files.stamps)
    auto_backbone = Backbone(loaded, fingerprint=digest)
    options = DataOptions(max_new_tokens=new_tokens, max_prompt_tokens=auto_backbone.max_positions)
    texts = answers(auto_backbone, tokenizer, suite_questions, options)
    backbone = Backbone(loaded, executor="generic", fingerprint=digest)
    right: dict[str, dict[int, Right]] = {}
    for name in heads:
        exit_heads = heads_of(resolve_heads(name), backbone, files.label)
        right[name] = shares(backbone, exit_heads, texts)
    answered = sum(map(len, texts.values()))
    facts = {"model": files.label, "suite": suite, "new_tokens": new_tokens, "answered": answered}
    text = f"{answered} of {len(suite_questions)} questions were answered.\n\n{page(right)}"
    lab.finish(output, {**facts, "questions": len(suite_questions), "right": right}, text)


def answers(
    backbone: Backbone, tokenizer: Any, questions: Sequence[Question], options: DataOptions
) -> dict[str, list[Conversation]]:
    texts = defaultdict(list)
    with bar("answers", "rounds") as show:
        rounds = itertools.count(1)
        author = Author(backbone, tokenizer, options, lambda _: show(next(rounds), None))
        talks = [
            replace(talk_of({"turns": [*question.turns]}, tokenizer, None), family=question.task)
            for question in questions
        ]
        for record in author.write(author.converse(talk, Counts()) for talk in talks):
            texts[record["family"]].append(from_ids(record))
    return dict(texts)


@torch.no_grad()
def shares(
    backbone: Backbone, heads: ExitHeads, texts: dict[str, list[Conversation]]
) -> dict[int, Right]:
    counts = {}
    for kind, talks in lab.track(list(texts.items()), "measure", "kinds of text"):
        source = StreamSource(backbone, FeatureSpec.read_by(heads), talks, BATCH_TOKENS)
        counts[kind] = count_right(heads, Selection(source).batches(), DRAFTS)
    counts["all"] = torch.stack([*counts.values()]).sum(0)
    return {
        layer: {
            kind: [(right, count) for count, right in by_layer[place].tolist() if count]
            for kind, by_layer in counts.items()
        }
        for place, layer in enumerate(heads.config.exit_layers)
    }


def page(by_heads: dict[str, dict[int, Right]]) -> str:
    kinds = list(next(iter(next(iter(by_heads.values())).values())))
    rows = [
        [name, str(layer), *(_cell(right[kind]) for kind in kinds)]
        for name, by_layer in by_heads.items()
        for layer, right in by_layer.items()
    ]
    title = "Share of answer tokens that heads say, in per cent: as first / second / third draft"
    return f"{title}\n\n{lab.table(['heads', 'layer', *kinds], rows)}"


def _cell(sums: Sequence[tuple[int, int]]) -> str:
    return " / ".join(f"{100 * right / max(1, number):.1f}" for right, number in sums)


if __name__ == "__main__":
    lab.run(main)
