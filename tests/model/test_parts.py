"""A decoder's parts under any family's names, or which one is missing; outputs of its layers."""

from __future__ import annotations

from collections.abc import Callable
from operator import setitem
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    CTRLConfig,
    GPT2Config,
    MambaConfig,
    MptConfig,
    OPTConfig,
    PreTrainedConfig,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from selfspec.api.speculator import wrap
from selfspec.errors import UnsupportedModel
from selfspec.heads.heads import DraftVocabulary, LinearHead, LogitLensHead
from selfspec.model.backbone import Backbone
from selfspec.model.generic import Decoder
from selfspec.model.parts import CACHE, captured_outputs, parts_of
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
    limits = {family: Decoder(make_model(family)).position_limit for family in families}
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
        if isinstance(config, T5Config):
            return T5ForConditionalGeneration(config)
        return AutoModelForCausalLM.from_config(config).eval()


WIDE: dict[str, Any] = {"hidden_size": 16, "vocab_size": 32}
ATTENDING = {"num_hidden_layers": 1, "num_attention_heads": 2, **WIDE}
SHORT: dict[str, Any] = {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 32}
T5: dict[str, Any] = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (BloomConfig(n_layer=1, n_head=2, **WIDE), "that take alibi"),
        (
            MptConfig(n_layers=1, d_model=16, n_heads=2, vocab_size=32),
            "has layers that take position_bias",
        ),
        (MambaConfig(num_hidden_layers=1, **WIDE), "has linear_attention layers, which cannot be"),
        (
            CTRLConfig(**SHORT, dff=16, n_positions=16),
            "has no final norm named norm, final_layer_norm",
        ),
        (
            OPTConfig(**ATTENDING, ffn_dim=16, word_embed_proj_dim=8),
            "has a decoder with project_out, a part that is not known",
        ),
        (T5Config(**T5, vocab_size=32), "has an encoder, expected a decoder alone"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.model_type,
)
def test_what_cannot_run_is_refused_with_its_reason(config: PreTrainedConfig, words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        Backbone(tiny(config))


class Scaled(nn.Module):
    def forward(
        self, hidden: Tensor, past_key_values: object, attention_scaling: Tensor | None = None
    ) -> Tensor:
        return hidden


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: setattr(m, "get_output_embeddings", lambda: None), "has no lm_head to read"),
        (lambda m: delattr(m.transformer, "wte"), "has no embedding named embed_tokens"),
        (lambda m: delattr(m.transformer, "h"), "has no list of layers named layers, h"),
        (lambda m: setitem(m.transformer.h, 0, Scaled()), "has layers that take attention_scaling"),
        # hidden states in, hidden states out
        (lambda m: setitem(m.transformer.h, 0, nn.Linear(16, 16)), "that take no keys and values"),
    ],
)
def test_a_missing_or_unknown_part_is_named(change: Callable[[Any], None], words: str) -> None:
    model = tiny(GPT2Config(**SHORT))
    model.get_output_embeddings = lambda: model.lm_head
    change(model)
    with pytest.raises(UnsupportedModel, match=words):
        parts_of(model)


@pytest.mark.parametrize("ids", [None, torch.tensor([3, 4, 90])])
def test_heads_add_the_bias_of_lm_head(ids: Tensor | None) -> None:
    model: Any = make_model("phi")
    unembedding = Decoder(model).unembedding
    vocabulary = DraftVocabulary.of(unembedding, ids)
    hidden = torch.randn(2, 32)
    whole = model.lm_head(model.model.final_layernorm(hidden))
    expected = whole if ids is None else whole[:, ids]
    for kind in (LogitLensHead, LinearHead):
        vocabulary = DraftVocabulary.of(unembedding, ids)
        torch.testing.assert_close(kind(unembedding, vocabulary)(hidden), expected)


# --- outputs of a normal pass


class Pair(nn.Module):
    """Returns a tuple, as decoder layers of some families do."""

    def forward(self, hidden: Tensor) -> tuple[Tensor, str]:
        return 2 * hidden, "other"


@torch.inference_mode()
def test_each_layers_output_is_its_hidden_state(model: PreTrainedModel, backbone: Backbone) -> None:
    with captured_outputs(list(backbone.layers)) as outputs:
        expected = model(random_ids(9), output_hidden_states=True).hidden_states
    assert sorted(outputs) == list(range(backbone.num_layers))
    # transformers' last entry is behind the final norm, ours is in front of it
    for layer in range(1, backbone.num_layers):
        assert torch.equal(outputs[layer - 1], expected[layer])
    assert torch.equal(model.get_decoder().norm(outputs[backbone.num_layers - 1]), expected[-1])


def test_the_newest_first_part_of_each_given_module_is_kept_and_the_pass_not_changed() -> None:
    modules = [Pair(), nn.Identity(), nn.Identity()]
    modules[0].register_forward_hook(lambda *_: None)
    with captured_outputs([modules[2], modules[0]]) as outputs:
        for place, value in ((0, 1.0), (1, 6.0), (2, 7.0)):
            modules[place](torch.tensor(value))
        assert modules[0](torch.tensor(3.0)) == (torch.tensor(6.0), "other")
    modules[2](torch.tensor(1.0))
    assert {key: value.item() for key, value in outputs.items()} == {0: 7.0, 1: 6.0}
    assert [len(module._forward_hooks) for module in modules] == [1, 0, 0]  # another's


def test_no_hook_is_left_behind_by_an_error_or_if_a_later_module_takes_none() -> None:
    first = nn.Identity()
    with pytest.raises(RuntimeError, match="in the middle"), captured_outputs([first]):
        raise RuntimeError("in the middle")
    assert not first._forward_hooks
    with pytest.raises(AttributeError), captured_outputs([first, "no module"]):  # type: ignore[list-item]  # the mistake
        raise AssertionError("not reached")
    assert not first._forward_hooks
