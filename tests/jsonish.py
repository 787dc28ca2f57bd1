"""A tiny random model with a tokenizer that can write JSON; called by tests of grammars."""

from __future__ import annotations

import json
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from selfspec.api.speculator import Speculator, wrap
from selfspec.model.backbone import Backbone
from tests.api.test_text import byte_level_bpe
from tests.ladder import deep_heads
from tests.models import make_model

END = "<end>"
VOCAB_SIZE = 384
"""Of the model; the tokenizer has fewer."""

_TEXT = [
    json.dumps({"name": name, "age": age, "tags": ["red", "green"], "ok": True})
    for name, age in (("Ada", 36), ("Alan", 41), ("Grace", 85))
]


def tokenizer() -> PreTrainedTokenizerFast:
    """Trained on a little JSON."""
    return byte_level_bpe(_TEXT, VOCAB_SIZE - 16)


def speculator(**options: Any) -> Speculator:
    """In float64, where rows cannot move a choice; its heads stand on some layers and on none."""
    words = tokenizer()
    model = make_model("llama", torch.float64, vocab_size=VOCAB_SIZE)
    assert model.generation_config is not None
    model.generation_config.eos_token_id = words.eos_token_id
    heads = deep_heads(Backbone(model, executor="generic"))
    return wrap(model, words, heads=heads, executor="generic", **options)
