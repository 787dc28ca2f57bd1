"""A tiny model that writes conversations in ten words; called by the tests of `selfspec data`."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from selfspec.model.backbone import Backbone
from selfspec.training.options import DataOptions
from selfspec.training.recipe import Passages, Recipe, read_recipe
from selfspec.training.selfgen import Admission, Author, Batch, Proposal, Written, write
from selfspec.training.text import Counts, Writer
from tests.models import make_model
from tests.talks import WORDS, make_tokenizer

RECIPE = """
families:
  free:
    weight: 3
    continues: true
    ask: ["a b", "c"]
  pair:
    weight: 2
    ask: ["{word} {other} {word}", ["c {other}", null, "b"]]
  article:
    weight: 1
    passages: true
    ask: ["c c {word}"]
  about:
    weight: 2
    passage: {tokens: [3, 8]}
    ask: ["{passage} {word}", "b {passage}"]
  read:
    weight: 1
    read: true
    passage: {tokens: [3, 8]}
    ask: ["{passage}"]
lists:
  word: [a, b, a b, b b, c a]
  other: [a a, b c, c b a]
"""
"""Every kind of family, in the words of `talks`."""
SMALL: dict[str, Any] = {
    "batch_size": 6,
    "question_temperature": (4.0, 6.0),  # a random model is confident
    "max_question_tokens": 12,
    "max_new_tokens": 20,
}


def make_author(**options: Any) -> Author:
    """An author whose model knows only the words of `talks`."""
    return Author(_backbone(), make_tokenizer(), DataOptions(**SMALL | options), lambda _: None)


@functools.cache
def _backbone() -> Backbone:
    return Backbone(make_model("llama", vocab_size=len(WORDS)))


def recipe_of(text: str, folder: Path) -> Recipe:
    path = folder / "recipe-of-a-test.yaml"
    path.write_text(text, encoding="utf-8")
    return read_recipe(path)


def invent(author: Author, output: Path, recipe: str = RECIPE, ahead: int = 1) -> Counts:
    """Let `author` write rows of a recipe, up to the number of tokens in its options."""
    writer = Writer(output, {}, {})
    prompts = author.prompts(recipe_of(recipe, output.parent), Passages())
    source = Admission(author.options, writer.records())
    submit = at_once(Written(author, prompts).propose)
    for _ in write(source, writer, author.options, submit, ahead):
        pass
    return writer.counts


def at_once(propose: Callable[[Any], Proposal]) -> Callable[[Batch], Callable[[], Proposal]]:
    """Submit that runs each batch at once, on a copy, as an idle worker would."""

    def submit(batch: Batch) -> Callable[[], Proposal]:
        proposal = propose(copy.deepcopy(batch))
        return lambda: proposal

    return submit


def counted(**values: int) -> Counts:
    """Counts of rows without a family."""
    counts = Counts()
    for name, value in values.items():
        counts.add("", name, value)
    return counts


def prompt_ids(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> list[int]:
    """Ids of messages by the chat template, up to the start of the next answer."""
    ids: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    return list(ids["input_ids"])


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
