"""A tiny model that writes conversations in ten words; called by the tests of `selfspec data`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from selfspec.model.backbone import Backbone
from selfspec.training.data_options import DataOptions
from selfspec.training.selfgen import Author, Invented, write
from selfspec.training.writer import Counts, Writer
from tests.models import make_model
from tests.talks import WORDS, make_tokenizer

OPENINGS = ("a b", "c")
SMALL: dict[str, Any] = {
    "batch_size": 6,
    "question_temperature": (4.0, 6.0),  # a random model is sure of itself
    "max_question_tokens": 12,
    "max_new_tokens": 20,
}


def make_author(**options: Any) -> Author:
    """An author whose model knows nothing but the words of `talks`."""
    model = make_model("llama", vocab_size=len(WORDS))
    return Author(
        Backbone(model), make_tokenizer(), DataOptions(**SMALL | options), lambda tokens: None
    )


def invent(author: Author, output: Path) -> Counts:
    """Write what `author` invents, up to its options' tokens."""
    writer = Writer(output, {}, {})
    for _ in write(Invented(author, OPENINGS, writer.records()), writer, author.options):
        pass
    return writer.counts


def prompt_ids(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> list[int]:
    """What the chat template makes of messages, up to where the next answer starts."""
    made: Any = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True
    )
    return list(made["input_ids"])


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
