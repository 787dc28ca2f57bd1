"""What `wrap` and `load` cannot take: what was found, what was expected, what to do."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM, LlamaForCausalLM

from selfspec.api import speculator as generate
from selfspec.errors import (
    HeadsMismatch,
    HeadsNotFound,
    InvalidOption,
    SelfspecError,
    UnsupportedModel,
)
from selfspec.heads.exit_heads import logit_lens
from selfspec.model.backbone import Backbone
from tests.models import make_model


def meta_model() -> Any:
    config: Any = make_model("llama").config
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def bert() -> Any:
    sizes: Any = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return BertForMaskedLM(BertConfig(**sizes, intermediate_size=16, vocab_size=32))


def heads_of(**overrides: Any) -> Any:
    backbone = Backbone(make_model("llama", **overrides), executor="generic")
    return logit_lens(backbone.unembedding, backbone.num_layers, "other")


class Processor:
    """Has a tokenizer, and is none."""

    tokenizer = None


Model = Any

load: Any = generate.load
wrap: Any = generate.wrap

CASES: list[tuple[Callable[[Model], Any], type[SelfspecError], str]] = [
    (lambda _: wrap(None), InvalidOption, "model is of type NoneType.*selfspec.load"),
    (lambda _: wrap("gpt2"), InvalidOption, "model is of type str.*expected a causal"),
    (lambda _: wrap(LlamaForCausalLM), InvalidOption, "model is a class, LlamaForCausalLM"),
    (lambda _: wrap(nn.Linear(2, 2)), InvalidOption, "model is of type Linear"),
    (lambda model: wrap(model.model), InvalidOption, "model is of type LlamaModel"),
    (lambda _: wrap(bert()), InvalidOption, "model is of type BertForMaskedLM"),
    (lambda _: wrap(meta_model()), InvalidOption, "no weights.*from_pretrained"),
    (lambda model: wrap(model, "gpt2"), InvalidOption, "tokenizer is of type str.*AutoTokenizer"),
    (lambda model: wrap(model, Processor()), InvalidOption, "tokenizer is of type Processor"),
    (lambda model: wrap(model, heads=3), InvalidOption, "heads are of type int.*selfspec heads"),
    (lambda model: wrap(model, heads=nn.Linear(2, 2)), InvalidOption, "heads are of type Linear"),
    (lambda model: wrap(model, heads="none-such"), HeadsNotFound, "Known: "),
    (
        lambda model: wrap(model, heads=heads_of(num_hidden_layers=4)),
        HeadsMismatch,
        "for 4 layers, 32 numbers wide, and 96 tokens, the model has 6, 32 and 96.*selfspec fit",
    ),
    (lambda model: wrap(model, heads=heads_of(vocab_size=64)), HeadsMismatch, "and 64 tokens"),
    *(
        (
            lambda _, count=count: wrap(make_model("llama", max_position_embeddings=count)),
            UnsupportedModel,
            f"max_position_embeddings of the model's config is {count}, expected at least 1",
        )
        for count in (0, -1)
    ),
    (lambda model: wrap(model, executor="fast"), InvalidOption, "executor is 'fast'.*Leave it out"),
    (lambda model: wrap(model, executor=None), InvalidOption, "executor is None"),
    (lambda model: wrap(model, draft_model="x"), InvalidOption, "draft_model is of type str"),
    (lambda model: wrap(model, colour=3), InvalidOption, "unknown option 'colour'"),
    (lambda model: load(model), InvalidOption, r"use selfspec\.wrap\(model\)"),
    (lambda _: load(3), InvalidOption, "model is of type int"),
    (lambda _: load(""), InvalidOption, "model is empty"),
    (lambda _: load(draft_model=3), InvalidOption, "draft_model is of type int"),
    (lambda _: load(heads=3), InvalidOption, "heads are of type int"),
    (lambda _: load(device=[]), InvalidOption, "device is .., expected cpu"),
    (lambda _: load(attn_implementation=3), InvalidOption, "attn_implementation is 3"),
    (lambda _: load(dtype="float8_e4m3fn"), InvalidOption, "dtype is 'float8_e4m3fn', expected"),
]


@pytest.mark.parametrize("case", CASES, ids=[words for *_, words in CASES])
def test_it_says_what_was_found_and_what_to_do(
    case: tuple[Callable[[Model], Any], type[SelfspecError], str], model: Model
) -> None:
    call, kind, words = case
    with pytest.raises(kind, match=words) as caught:
        call(model)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("how", [copy.deepcopy, copy.copy, pickle.dumps])
@pytest.mark.parametrize("part", ["backbone", "heads", "session", "engine", "hf", "runtime"])
@pytest.mark.parametrize("executor", ["auto", "generic"])
def test_what_holds_a_model_is_not_copied(
    how: Callable[[Any], Any], part: str, executor: str, model: Model
) -> None:
    speculator = wrap(model, heads="logit-lens", executor=executor)
    held = getattr(speculator, part)
    held = held() if part in ("session", "engine", "hf") else held
    for one in (speculator, held):
        if how is copy.copy and one is not speculator.backbone:
            continue  # shares the model, as it should
        with pytest.raises(TypeError, match=r"wrap the copy: selfspec\.wrap\(") as caught:
            how(one)
        assert "\n" not in str(caught.value)


def test_a_model_that_was_wrapped_is_copied_and_the_copy_runs(model: Model) -> None:
    first = wrap(model, heads="logit-lens")
    second = wrap(copy.deepcopy(model), heads="logit-lens")
    assert second.generate([1, 2, 3]).token_ids == first.generate([1, 2, 3]).token_ids
