"""The parts of a decoder are found under any family's names, or it is said which one is missing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    CTRLConfig,
    FalconConfig,
    GPT2Config,
    MambaConfig,
    MptConfig,
    OPTConfig,
    PreTrainedConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from selfspec.api.speculator import wrap
from selfspec.errors import UnsupportedModel
from selfspec.heads.heads import DraftVocabulary, LinearHead, LogitLensHead
from selfspec.model.backbone import Backbone
from selfspec.model.parts import CACHE, parts_of
from tests.models import BREADTH, MAX_POSITIONS, make_model, random_ids

NEW = [*BREADTH, "gpt_neox"]


@pytest.mark.parametrize("family", NEW)
def test_drafts_leave_the_text_of_new_families_as_it_is(family: str) -> None:
    model, ids = make_model(family, torch.float64), random_ids(30)
    made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=30)  # type: ignore[operator]  # a mixin
    options: dict[str, Any] = {"drafter": "exit:layers=2/4,threshold=0.02"}
    speculator = wrap(model, heads="logit-lens", never_slower=False, **options)
    answer = speculator.generate(ids, max_new_tokens=30)
    assert answer.token_ids == made[0, 30:].tolist()
    assert answer.stats.drafted > 0


def test_positions_end_where_they_are_learned_and_not_where_they_are_rotated() -> None:
    families = ("llama", "gpt_neox", "llama4", "gpt2", "opt", "gptj")
    limits = {family: Backbone(make_model(family)).position_limit for family in families}
    learned = dict.fromkeys(("gpt2", "opt"), MAX_POSITIONS)
    rotary = parts_of(make_model("gptj")).rotary_emb  # transformers 5.24 has one
    table_in_each_layer = {"gptj": MAX_POSITIONS if rotary is None else None}
    assert limits == dict.fromkeys(families) | learned | table_in_each_layer


def test_layers_are_found_under_the_names_of_each_family() -> None:
    neox: Any = make_model("gpt_neox")
    parts = parts_of(neox)
    assert parts.embed_tokens is neox.gpt_neox.embed_in
    assert parts.norm is neox.gpt_neox.final_layer_norm
    assert parts.cache_keyword in ("cache", "layer_past")
    gpt2: Any = make_model("gpt2")
    assert parts_of(gpt2).layers is gpt2.transformer.h
    assert parts_of(gpt2).rotary_emb is None
    assert parts_of(make_model("llama")).cache_keyword == CACHE


def tiny(config: PreTrainedConfig) -> Any:
    with torch.random.fork_rng():
        return AutoModelForCausalLM.from_config(config).eval()


_GPT2: dict[str, Any] = {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 32}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            BloomConfig(n_layer=1, hidden_size=16, n_head=2, vocab_size=32),
            "that take alibi",
        ),
        (
            MptConfig(n_layers=1, d_model=16, n_heads=2, vocab_size=32),
            "has layers that take position_bias",
        ),
        (
            FalconConfig(num_hidden_layers=1, hidden_size=16, num_attention_heads=2, vocab_size=32),
            "that take alibi",
        ),
        (
            MambaConfig(num_hidden_layers=1, hidden_size=16, vocab_size=32),
            "has linear_attention layers, which cannot be rewound",
        ),
        (
            CTRLConfig(n_layer=1, n_embd=16, n_head=2, dff=16, vocab_size=32, n_positions=16),
            "has no final norm named norm, final_layer_norm",
        ),
        (
            OPTConfig(
                num_hidden_layers=1,
                hidden_size=16,
                num_attention_heads=2,
                vocab_size=32,
                ffn_dim=16,
                word_embed_proj_dim=8,
            ),
            "has a decoder with project_out, a part that is not known",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else value.model_type,
)
def test_what_cannot_run_is_refused_with_its_reason(config: PreTrainedConfig, words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        Backbone(tiny(config))


def test_an_encoder_is_refused() -> None:
    config = T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=32)
    model: Any = T5ForConditionalGeneration(config)
    with pytest.raises(UnsupportedModel, match="has an encoder, expected a decoder alone"):
        Backbone(model)


def test_a_model_without_lm_head_a_list_of_layers_or_an_embedding_is_refused() -> None:
    model = tiny(GPT2Config(**_GPT2))
    model.get_output_embeddings = lambda: None
    with pytest.raises(UnsupportedModel, match="has no lm_head to read tokens from"):
        parts_of(model)
    model = tiny(GPT2Config(**_GPT2))
    model.get_output_embeddings = lambda: model.lm_head
    del model.transformer.wte
    with pytest.raises(UnsupportedModel, match="has no embedding named embed_tokens"):
        parts_of(model)
    del model.transformer.h
    with pytest.raises(UnsupportedModel, match="has no list of layers named layers, h"):
        parts_of(model)


def test_layers_that_may_be_given_what_is_not_known_are_refused() -> None:
    class Scaled(nn.Module):
        def forward(
            self, hidden: Tensor, past_key_values: object, attention_scaling: Tensor | None = None
        ) -> Tensor:
            return hidden

    model = tiny(GPT2Config(**_GPT2))
    model.transformer.h[0] = Scaled()
    with pytest.raises(UnsupportedModel, match="has layers that take attention_scaling"):
        parts_of(model)


def test_fewer_layers_than_the_config_says_are_refused() -> None:
    model = make_model("llama")
    model.config.num_hidden_layers = 12
    with pytest.raises(UnsupportedModel, match="has 6 layers, expected the 12 of its config"):
        parts_of(model)


def test_layers_without_a_cache_are_refused() -> None:
    model = tiny(GPT2Config(**_GPT2))
    model.transformer.h[0] = nn.Linear(16, 16)  # hidden states in, hidden states out
    with pytest.raises(UnsupportedModel, match="layers that take no keys and values"):
        parts_of(model)


@pytest.mark.parametrize("ids", [None, torch.tensor([3, 4, 90])])
def test_heads_add_the_bias_of_lm_head(ids: Tensor | None) -> None:
    model: Any = make_model("phi")
    unembedding = Backbone(model).unembedding
    vocabulary = DraftVocabulary.of(unembedding, ids)
    hidden = torch.randn(2, 32)
    whole = model.lm_head(model.model.final_layernorm(hidden))
    expected = whole if ids is None else whole[:, ids]
    for kind in (LogitLensHead, LinearHead):
        vocabulary = DraftVocabulary.of(unembedding, ids)
        torch.testing.assert_close(kind(unembedding, vocabulary)(hidden), expected)
