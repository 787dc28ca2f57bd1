"""Executors run only layers whose results agree at near and far positions; mixing is found."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import wraps
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from selfspec.api.speculator import wrap
from selfspec.errors import UnsupportedModel
from selfspec.eval.verify import hugging_face, planted_drafts
from selfspec.model.backbone import Backbone
from selfspec.model.check import far_places, named_positions
from selfspec.model.cuda_graph import CudaGraphExecutor
from selfspec.model.fused import FusedExecutor, Rotations
from selfspec.model.kv import Span
from selfspec.model.parts import parts_of
from selfspec.model.recipe import Attention
from tests.models import make_model, needs_compiler, random_ids


class Doubling(nn.Linear):
    """A linear layer of another class."""


class Gated(LlamaMLP):
    """An MLP that also doubles its result, but only if an input is large."""

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = super().forward(x)
        return output * 2 if float(x.abs().max()) > 1e3 else output


def branches(self: Any, x: Tensor) -> Tensor:
    """A patch for a class: results differ only for inputs that no check has."""
    return Gated.forward(self, x)


def mlp(model: Any) -> Any:
    return model.model.layers[3].mlp


def _replaced(model: Any) -> None:
    module = mlp(model)
    module.forward = lambda hidden: LlamaMLP.forward(module, hidden)


def _capped(model: Any) -> None:
    model.config._attn_implementation = "eager"
    model.model.layers[3].self_attn.attn_logit_softcapping = 1e3


def _sinks(model: Any) -> None:
    model.model.layers[3].self_attn.sinks = nn.Parameter(torch.zeros(4))


CHANGES: list[tuple[Callable[[Any], object], str]] = [
    (_sinks, "layer 4: self_attn has sinks"),
    (
        lambda m: m.model.layers[3].add_module("extra_norm", nn.LayerNorm(32)),
        "layer 4: the layer holds extra_norm, input_layernorm",
    ),
    (lambda m: mlp(m).register_buffer("scale", torch.ones(1)), "layer 4: mlp has scale"),
    (_replaced, "the forward of layers.3.mlp was replaced"),
    (lambda m: setattr(mlp(m), "__class__", Gated), r"3.mlp \(Gated\) runs code of tests.model"),
    (
        lambda m: setattr(mlp(m).up_proj, "__class__", Doubling),
        "layer 4: up_proj is tests.model.test_check.Doubling",
    ),
    (lambda m: mlp(m).double(), "layer 4: .*torch.float64"),
    (lambda m: m.double(), "lm_head: weights are torch.float64"),
    (lambda m: m.lm_head.register_forward_pre_hook(lambda _, args: None), "lm_head has hooks"),
    (lambda m: m.model.norm.register_forward_hook(lambda *_: None), "norm has hooks"),
    (lambda m: parametrizations.weight_norm(mlp(m).up_proj), "layer 4: .*up_proj"),
    (lambda m: setattr(m.config, "is_causal", False), "attention is not causal"),
    (lambda m: setattr(m.config, "clip_qkv", 1e3), "queries, keys and values are clipped"),
    (_capped, "layer 4: attention may cap its scores"),
    (lambda m: setattr(mlp(m), "act_fn", nn.ReLU6()), "the activation is ReLU6"),
]


@needs_compiler
@pytest.mark.parametrize(("change", "found"), CHANGES)
def test_hidden_changes_are_refused(change: Callable[[Any], object], found: str) -> None:
    model: Any = make_model("llama")
    FusedExecutor(parts_of(model), model.lm_head)
    change(model)
    with pytest.raises(ValueError, match=found):
        FusedExecutor(parts_of(model), model.lm_head)


@pytest.mark.parametrize("wrapped", [False, True])
def test_classes_with_foreign_code_are_not_accepted(
    model: Any, monkeypatch: pytest.MonkeyPatch, *, wrapped: bool
) -> None:
    CudaGraphExecutor(parts_of(model), model.lm_head)
    code = wraps(LlamaMLP.forward)(branches) if wrapped else branches
    monkeypatch.setattr(LlamaMLP, "forward", code)
    for executor in (FusedExecutor, CudaGraphExecutor):
        with pytest.raises(ValueError, match=r"layers.0.mlp \(LlamaMLP\) runs code of tests.model"):
            executor(parts_of(model), model.lm_head)


def test_hooks_of_all_modules_count(model: Any) -> None:
    with nn.modules.module.register_module_forward_hook(lambda *_: None):
        for executor in (FusedExecutor, CudaGraphExecutor):
            with pytest.raises(ValueError, match="hooks are set for all modules"):
                executor(parts_of(model), model.lm_head)


@needs_compiler
def test_an_executor_wrong_at_far_positions_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Rotations.at

    def far(self: Any, rows: Tensor, spans: Sequence[Span], offset: int) -> list[Tensor]:
        (turns,) = original(self, rows, spans, offset)
        return [turns.conj().resolve_conj() if spans[0].positions[-1] >= 200 else turns]

    Backbone(make_model("llama"), executor="fused")
    monkeypatch.setattr(Rotations, "at", far)
    with pytest.raises(UnsupportedModel, match="at position 246"):
        Backbone(make_model("llama"), executor="fused")


@needs_compiler
def test_a_window_that_is_wrong_by_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("mistral", sliding_window=100)
    Backbone(model, executor="fused")
    wrong = {"window": 101}
    monkeypatch.setattr("selfspec.model.recipe.Attention", lambda **own: Attention(**own | wrong))
    with pytest.raises(UnsupportedModel, match="comes out differently at position 93"):
        Backbone(model, executor="fused")


def test_far_positions_come_from_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    rope = {"original_max_position_embeddings": 64.0, "factor": 8.0, "rope_theta": 10000.0}
    fields = {"sliding_window": 100, "rope_parameters": {"full_attention": rope}, "max_length": 20}
    fields |= {"num_hidden_layers": 30, "max_window_layers": 28, "is_position": True}
    assert named_positions(fields, 256) == {64, 100, 20}
    assert named_positions(fields, 80) == {64, 20}
    backbone = Backbone(make_model("mistral", sliding_window=100), executor="generic")
    assert far_places(backbone) == [(93, 93), (246, 246)]
    monkeypatch.setattr("selfspec.model.check._MOST_HELD", 200)
    assert far_places(backbone) == [(93, 93), (246, 0)]
    Backbone(make_model("mistral", sliding_window=100), executor="cuda-graph")


# --- rows of a pass that change each other: the model gets no drafts


class OneScale(nn.Linear):
    """Rounds activations to 8 bits, with one scale for all rows of a pass."""

    def scale(self, rows: Tensor) -> Tensor:
        return rows.abs().max()

    def forward(self, rows: Tensor) -> Tensor:
        scale = self.scale(rows).clamp(min=1e-9) / 127
        return super().forward((rows / scale).round() * scale)


class OwnScale(OneScale):
    def scale(self, rows: Tensor) -> Tensor:
        return rows.abs().amax(-1, keepdim=True)


def quantised(kind: type[nn.Linear], part: str, dtype: torch.dtype = torch.float32) -> Any:
    model: Any = make_model("llama", dtype, tie_word_embeddings=False)
    model.get_submodule(part).__class__ = kind
    return model


MIXED: dict[str, tuple[str, torch.dtype]] = {
    "layer 1": ("model.layers.0.mlp.down_proj", torch.float32),
    "layer 6": ("model.layers.5.mlp.down_proj", torch.bfloat16),
    "the logits": ("lm_head", torch.float32),
}


@pytest.mark.parametrize("where", MIXED)
def test_one_scale_for_all_rows_is_found_in_any_part(where: str) -> None:
    assert str(Backbone(quantised(OneScale, *MIXED[where])).mixing).startswith(f"{where}, by ")
    assert Backbone(quantised(OwnScale, *MIXED[where])).mixing is None


@pytest.mark.filterwarnings("ignore")  # torch deprecates it in favour of torchao
def test_such_a_model_gets_no_drafts_and_is_told_why(caplog: pytest.LogCaptureFixture) -> None:
    """torch's dynamic quantisation has one scale for the activations of a pass."""
    model: Any = make_model("llama")
    ids = random_ids(9)
    torch.ao.quantization.quantize_dynamic(model, {"model.layers.3.mlp.down_proj"}, inplace=True)
    with caplog.at_level(logging.WARNING):
        speculator = wrap(model, heads="logit-lens", drafter="exit:threshold=0.01")
    assert "no drafts for LlamaForCausalLM: the rows of a pass change each other" in caplog.text
    answer = speculator.generate(ids, max_new_tokens=40)
    assert answer.stats.drafted == 0
    assert str(answer.stats.drafts_refused).startswith("layer 4, by ")
    assert "no drafts: layer 4" in answer.stats.line()
    assert answer.token_ids == hugging_face(model, ids, 40)[0]
    assert set(planted_drafts(speculator, speculator.options, [1, 2])) == {"no"}
    plain = speculator.generate(ids, max_new_tokens=4, speculate=False)
    assert plain.stats.drafts_refused is None  # no drafts requested


def test_other_attention_masks_do_not_support_siblings() -> None:
    backbone = Backbone(make_model("llama"), executor="generic")
    backbone.config._attn_implementation = "flex_attention"  # its kernel killed the process
    assert not backbone.runs_trees


def test_float16_drafts_only_where_bits_are_pinned(caplog: pytest.LogCaptureFixture) -> None:
    """With this seed drafts changed the text."""
    speculator = wrap(make_model("llama", torch.float16), heads="logit-lens")
    ids, options = random_ids(9, seed=5), dict[str, Any](max_new_tokens=40)
    eager: dict[str, Any] = {"drafter": "exit:threshold=0.01", "never_slower": False}
    plain = speculator.generate(ids, **options, speculate=False)
    assert plain.stats.drafts_refused is None
    for drafting in (eager, {"drafter": "ngram"}):
        answer = speculator.generate(ids, **options | drafting)
        assert answer.token_ids == plain.token_ids
        assert "float16" in str(answer.stats.drafts_refused)
    assert caplog.text.count("no drafts in float16") == 1
    options |= {"pinned": True, "pinned_rows": 16}
    answer = speculator.generate(ids, **options | eager)
    assert answer.stats.drafted > 0
    assert answer.token_ids == speculator.generate(ids, **options, speculate=False).token_ids


# --- hooks and code that depend on the number of rows of a pass


BY_COUNT: dict[str, Callable[[Tensor], Tensor]] = {
    "the newest row": lambda out: torch.cat([out[:, :-1], out[:, -1:] + 1.0], dim=1),
    "what is written": lambda out: out + 1.0 if out.shape[1] == 1 else out,
    "the prompt": lambda out: out + 1.0 if out.shape[1] > 1 else out,
}


@pytest.mark.parametrize("place", ["model.layers.1", "lm_head"])
@pytest.mark.parametrize("kind", BY_COUNT)
def test_steering_by_row_position_gets_no_drafts(kind: str, place: str) -> None:
    model: Any = make_model("llama", tie_word_embeddings=False)
    model.get_submodule(place).register_forward_hook(lambda _, __, out: BY_COUNT[kind](out))
    ids = random_ids(5).repeat(1, 3)
    answer = wrap(model).generate(ids, max_new_tokens=20)
    assert answer.token_ids == hugging_face(model, ids, 20)[0]
    assert "gives a row other numbers in a pass of its own" in str(answer.stats.drafts_refused)


class Prepared(LlamaForCausalLM):
    def prepare_inputs_for_generation(self, *args: Any, **more: Any) -> Any:
        return super().prepare_inputs_for_generation(*args, **more)

    prepare_inputs_for_generation.__module__ = "peft.peft_model"


class OnlyCached(LlamaForCausalLM):
    def forward(self, use_cache: bool = False, **given: Any) -> Any:
        output = super().forward(use_cache=use_cache, **given)
        output["logits"] = -output.logits if use_cache else output.logits
        return output


ABOVE: list[tuple[Callable[[Any], object], str]] = [
    (lambda m: m.register_forward_hook(once), "at the logits"),
    (lambda m: m.register_forward_pre_hook(shifted, with_kwargs=True), "at layer 1"),
    (lambda m: setattr(m, "__class__", OnlyCached), "at the logits"),
    (lambda m: m.model.norm.register_forward_hook(lambda _, __, out: out), ""),
    (lambda m: setattr(m, "__class__", Prepared), "code of peft.peft_model.* wrap its get_base"),
    (lambda m: setattr(m, "_sample", once), f"chooses tokens by code of {__name__}, which is not"),
]


def once(_module: object, _args: object, out: Any) -> Any:
    """A hook that changes only passes of one row."""
    if out.logits.shape[1] == 1:
        out["logits"] = out.logits.roll(1, -1)
    return out


def shifted(_module: object, args: Any, keywords: dict[str, Any]) -> Any:
    """A hook that changes ids given by keyword, as `generate` gives them."""
    given = keywords.get("input_ids")
    return args, keywords if given is None else {**keywords, "input_ids": (given + 1) % 96}


@pytest.mark.parametrize(("change", "found"), ABOVE)
def test_hooks_above_the_layers_on_one_row_are_refused(
    change: Callable[[Any], object], found: str
) -> None:
    model: Any = make_model("llama")
    change(model)
    with pytest.raises(UnsupportedModel, match=found) if found else nullcontext():
        wrap(model)
