"""Conversations with a tiny model and a tokenizer of ten words; called by the tests of training."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from selfspec.training.text import Conversation
from tests.models import make_model, random_ids

Talks = list[Conversation]

TEMPLATE = (
    "{% for m in messages %}<start> {{ m.role }} {{ m.content }} <end> <line> {% endfor %}"
    "{% if add_generation_prompt %}<start> assistant {% endif %}"
)
WORDS = ["<start>", "<end>", "<line>", "<unused>", "system", "user", "assistant", "a", "b", "c"]


def make_talks(model: PreTrainedModel) -> Talks:
    """Twelve greedy answers of `model`, 12 to 23 tokens long."""
    return [answered(model, seed, 12 + seed) for seed in range(12)]


@torch.no_grad()
def answered(model: PreTrainedModel, seed: int, count: int) -> Conversation:
    """A random prompt of 5 tokens, and `count` greedy tokens."""
    ids = random_ids(5, seed)
    for _ in range(count):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    return Conversation(tuple(ids[0].tolist()), ((5, 5 + count),))


def talk_lines(model: PreTrainedModel) -> str:
    """The conversations of `make_talks` as lines of JSON."""
    talks = [{"input_ids": list(talk.ids), "answer_start": 5} for talk in make_talks(model)]
    return "".join(json.dumps(talk) + "\n" for talk in talks)


def dialogue(*texts: Any, rule: str = "") -> list[dict[str, Any]]:
    """Turns of a user and an assistant, alternately, after the system's `rule` if there is one."""
    roles = itertools.cycle(("user", "assistant"))
    turns = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    return [{"role": "system", "content": rule}, *turns] if rule else turns


def save_tiny(folder: Path, family: str = "llama", **sizes: Any) -> Path:
    """Save a model and its tokenizer to a folder, and return the folder."""
    make_model(family, **sizes).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def make_tokenizer() -> PreTrainedTokenizerBase:
    """A tokenizer of whole words, with a chat template and a special token without a role."""
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "c"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    built = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", bos_token="<start>")
    built.add_tokens(["<unused>"], special_tokens=True)
    built.chat_template = TEMPLATE
    assert len(built) == len(WORDS)
    return built
