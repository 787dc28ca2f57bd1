"""An executor takes layers only if it knows all that they are made of, near and far."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Ministral3Config, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

from selfspec.api.speculator import wrap
from selfspec.errors import UnsupportedModel
from selfspec.model.backbone import Backbone
from selfspec.model.conformance import named_positions, stretches
from selfspec.model.executors.known import require_capturable, require_known
from selfspec.model.executors.rotations import Rotations
from selfspec.model.executors.source import words
from selfspec.model.parts import parts_of
from tests.models import FAMILIES, PACKED_EXECUTORS, make_model, random_ids

THRESHOLD = 32


@pytest.fixture
def ministral(monkeypatch: pytest.MonkeyPatch) -> Callable[[torch.dtype], PreTrainedModel]:
    """A tiny Ministral 3, whose queries grow with each THRESHOLD positions."""
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "llama_4_scaling_beta": 0.9,
        "original_max_position_embeddings": THRESHOLD,
    }
    special = {"rope_parameters": rope, "tie_word_embeddings": False}
    monkeypatch.setitem(FAMILIES, "ministral3", (Ministral3Config, special))
    return lambda dtype: make_model("ministral3", dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_queries_scaled_by_position_come_out_as_the_models_own(
    ministral: Callable[[torch.dtype], PreTrainedModel], dtype: torch.dtype
) -> None:
    model, ids = ministral(dtype), random_ids(THRESHOLD - 5)
    speculator = wrap(model, heads="logit-lens", drafter="exit:threshold=0.05")
    answer = speculator.generate(ids, max_new_tokens=3 * THRESHOLD)
    expected = model.generate(ids, max_new_tokens=3 * THRESHOLD, do_sample=False)  # type: ignore[operator]  # typed as Tensor | Module upstream
    assert answer.token_ids == expected[0, ids.shape[1] :].tolist()
    assert speculator.backbone.executor_name == "generic"


@pytest.mark.parametrize("executor", PACKED_EXECUTORS)
def test_what_knows_no_scaling_by_position_is_refused_by_what_it_does_not_know(
    ministral: Callable[[torch.dtype], PreTrainedModel], executor: str
) -> None:
    with pytest.raises(UnsupportedModel, match="get_llama_4_attn_scale"):
        Backbone(ministral(torch.float32), executor=executor)


class Doubling(nn.Linear):
    """A linear layer of another kind."""


def scaled(self: Any, hidden: Tensor) -> Tensor:
    """An MLP that does more, in words that nobody knows."""
    return self.down_proj(self.act_fn(self.gate_proj(hidden)) * self.up_proj(hidden)).mul(1.5)


def _parameter(model: Any) -> None:
    model.model.layers[3].self_attn.sinks = nn.Parameter(torch.zeros(4))


def _buffer(model: Any) -> None:
    model.model.layers[3].mlp.register_buffer("scale", torch.ones(1))


def _replaced(model: Any) -> None:
    own = model.model.layers[3].mlp
    own.forward = lambda hidden: LlamaMLP.forward(own, hidden)


def _kind(model: Any) -> None:
    model.model.layers[3].mlp.up_proj.__class__ = Doubling


def _dtype(model: Any) -> None:
    model.model.layers[3].mlp.double()


def _hook(model: Any) -> None:
    model.lm_head.register_forward_pre_hook(lambda _, args: args)


def _weight_norm(model: Any) -> None:
    torch.nn.utils.parametrizations.weight_norm(model.model.layers[3].mlp.up_proj)


def _causal(model: Any) -> None:
    model.config.is_causal = False


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (_parameter, "layer 4: self_attn has sinks"),
        (_buffer, "layer 4: mlp has scale"),
        (_replaced, "layer 4: the forward of mlp was replaced"),
        (_kind, "mlp.up_proj is tests.model.test_known.Doubling"),
        (_dtype, "layer 4: mlp.gate_proj: weights are torch.float64"),
        (_hook, "lm_head has hooks"),
        (_weight_norm, "mlp.up_proj"),
        (_causal, "attention is not causal"),
    ],
)
def test_one_unknown_part_is_enough(change: Callable[[Any], None], found: str) -> None:
    model: Any = make_model("llama")
    change(model)
    with pytest.raises(ValueError, match=found):
        require_known(parts_of(model), model.lm_head)


def test_classes_whose_code_is_another_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = make_model("llama")
    require_known(parts_of(model), model.lm_head)
    monkeypatch.setattr(LlamaMLP, "forward", scaled)
    with pytest.raises(ValueError, match=r"LlamaMLP uses \.mul"):
        require_known(parts_of(model), model.lm_head)
    assert Backbone(model).executor_name == "generic"


def test_hooks_of_all_modules_count(model: Any) -> None:
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        with pytest.raises(ValueError, match="hooks are set for all modules"):
            require_known(parts_of(model), model.lm_head)
        with pytest.raises(ValueError, match="hooks are set for all modules"):
            require_capturable(model.model, model.lm_head)
    finally:
        handle.remove()


def keeps(self: Any, hidden: Tensor) -> Tensor:
    """Python does something that a graph would not repeat."""
    self.calls = 1
    return self.down_proj(self.act_fn(self.gate_proj(hidden)) * self.up_proj(hidden))


def reads(self: Any, hidden: Tensor) -> Tensor:
    """Python decides by a value of the device."""
    factor = 2.0 if hidden.sum().item() > 0 else 1.0
    return self.down_proj(self.act_fn(self.gate_proj(hidden)) * self.up_proj(hidden)) * factor


@pytest.mark.parametrize(("code", "found"), [(keeps, "keeps self.calls"), (reads, "reads values")])
def test_what_a_graph_would_not_repeat_is_not_captured(
    model: Any, monkeypatch: pytest.MonkeyPatch, code: Any, found: str
) -> None:
    decoder = parts_of(model)
    require_capturable(decoder, model.lm_head)
    monkeypatch.setattr(LlamaMLP, "forward", code)
    with pytest.raises(ValueError, match=found):
        require_capturable(decoder, model.lm_head)


def test_words_name_what_a_forward_uses() -> None:
    found = words(LlamaAttention.forward)
    assert {"self.q_proj", "config._attn_implementation", "apply_rotary_pos_emb"} <= found
    assert "scaling=" in found
    assert "rotate_half" in found  # of a function that it calls
    with pytest.raises(ValueError, match="is no function of Python"):
        words(len)


@pytest.mark.parametrize("executor", PACKED_EXECUTORS)
def test_an_executor_that_errs_only_far_from_the_start_is_not_chosen(
    executor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Rotations.at

    def far(self: Any, rows: Tensor, positions: Tensor, start: int) -> list[Tensor]:
        (turns,) = right(self, rows, positions, start)
        return [turns.conj().resolve_conj() if int(positions[-1]) >= 200 else turns]

    Backbone(make_model("llama"), executor=executor)
    monkeypatch.setattr(Rotations, "at", far)
    with pytest.raises(UnsupportedModel, match="at position 246"):
        Backbone(make_model("llama"), executor=executor)


@pytest.mark.parametrize("executor", PACKED_EXECUTORS)
def test_a_window_that_is_wrong_by_one_is_found_behind_it(
    executor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("mistral", sliding_window=100)
    Backbone(model, executor=executor)
    monkeypatch.setattr("selfspec.model.executors.recipe.window_of", lambda *_: 101)
    with pytest.raises(UnsupportedModel, match="comes out differently at position 93"):
        Backbone(model, executor=executor)


def test_a_decoder_that_does_more_far_from_the_start_is_refused() -> None:
    model: Any = make_model("llama")
    whole = model.model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        output = whole(*args, **kwargs)
        if int(kwargs["position_ids"].max()) >= 200:
            output.last_hidden_state = output.last_hidden_state * 2
        return output

    model.model.forward = forward
    with pytest.raises(UnsupportedModel, match="the logits"):
        Backbone(model)


def test_far_places_are_those_that_the_config_names(monkeypatch: pytest.MonkeyPatch) -> None:
    rope = {"original_max_position_embeddings": 64.0, "factor": 8.0, "rope_theta": 10000.0}
    fields = {"sliding_window": 100, "rope_parameters": {"full_attention": rope}, "max_length": 20}
    fields |= {"num_hidden_layers": 30, "max_window_layers": 28, "is_position": True}
    assert named_positions(fields, 256) == {64, 100, 20}
    assert named_positions(fields, 80) == {64, 20}
    backbone = Backbone(make_model("mistral", sliding_window=100), executor="generic")
    assert stretches(backbone) == [(93, 93), (246, 246)]
    monkeypatch.setattr("selfspec.model.conformance._MOST_HELD", 200)
    assert stretches(backbone) == [(93, 93), (246, 0)]
    for executor in ("packed", "cuda-graph"):
        Backbone(make_model("mistral", sliding_window=100), executor=executor)
