"""A tiny random model with a tokenizer that can write JSON; called by tests of grammars."""

from __future__ import annotations

import json
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from selfspec.api.speculator import Speculator, wrap
from selfspec.model.backbone import Backbone
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
    """Byte-level BPE, trained on a little JSON."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - 16,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[END],
        show_progress=False,
    )
    inner.train_from_iterator(_TEXT, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=END)


def speculator(**options: Any) -> Speculator:
    """In float64, where rows cannot move a choice; its heads stand on some layers and on none."""
    words = tokenizer()
    model = make_model("llama", torch.float64, vocab_size=VOCAB_SIZE)
    assert model.generation_config is not None
    model.generation_config.eos_token_id = words.eos_token_id
    heads = deep_heads(Backbone(model, executor="generic"))
    return wrap(model, words, heads=heads, executor="generic", **options)
