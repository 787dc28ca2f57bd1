"""Layers as data: the settings of every family, found by running its modules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eval.families import tiny_model
from selfspec.eval.verify import WAYS, Way, logits_of
from selfspec.model import recipe
from selfspec.model.backbone import Backbone
from selfspec.model.parts import attention_types, parts_of
from selfspec.model.recipe import norm_of, rotation_of, shares_of
from tests.models import make_model, needs_compiler, random_ids

FAMILIES = [
    *("llama", "mistral", "qwen2", "qwen3"),
    *("gemma", "gemma2", "gemma3_text", "vaultgemma"),  # offsets, post-norms, two rotations
    *("cohere", "cohere2", "phi", "gpt_neox", "stablelm"),  # parallel, partly rotated
    *("olmo2", "olmo3", "exaone4"),  # only post-norms, whole-row norms, unrotated layers
    *("glm", "glm4", "helium", "ernie4_5", "smollm3"),  # interleaved rotations
    *("phi3", "granite", "hyperclovax", "hunyuan_v1_dense"),  # joined weights, factors
    *("starcoder2", "nemotron", "arcee", "jais2"),  # MLPs without gates, biases
    *("mixtral", "qwen3_moe", "flex_olmo", "olmoe", "cohere2_moe"),  # experts
]


def error(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth.double()).square().mean().sqrt())


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_torchs_default_dtype_does_not_matter(dtype: torch.dtype) -> None:
    model, default = make_model("llama"), torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        assert Backbone(model).executor_name == "fused"
    finally:
        torch.set_default_dtype(default)


@needs_compiler
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_code_runs_the_family(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As exact as the model's own modules; no other row changes a row's bits, also on a branch."""
    ids = random_ids(90)[0]  # across the end of a block of 64 positions
    model = tiny_model(family, torch.float32)
    with torch.no_grad():
        truth = tiny_model(family, torch.float64)(ids[None]).logits[0]
        own_logits = model(ids[None]).logits[0]
    monkeypatch.setattr(recipe.Norm, "__eq__", None)  # on Python 3.13 it fails for tensors
    backbone = Backbone(model)
    assert backbone.executor_name == "fused", backbone.refusals
    logits = logits_of(backbone, ids)
    assert error(logits, truth) < 2 * error(own_logits, truth)
    for way in (Way([1, 3, 60, 7, 19]), WAYS["as a branch of a tree"]):
        assert torch.equal(logits_of(backbone, ids, way), logits)


def test_unknown_norms_and_routers_are_refused() -> None:
    with pytest.raises(ValueError, match="Linear shares rows out in an unknown way"):
        shares_of(nn.Linear(32, 4), torch.float32)
    with pytest.raises(ValueError, match="Softmax is neither RMSNorm nor LayerNorm"):
        norm_of(nn.Softmax(-1), 16, torch.float32)
    with pytest.raises(ValueError, match="Flatten gives"):
        norm_of(nn.Flatten(0), 16, torch.float32)


@needs_compiler
def test_experts_run_in_bfloat16_too() -> None:
    """Rounding may choose another expert, which is no error."""
    backbone, ids = Backbone(tiny_model("mixtral", torch.bfloat16)), torch.arange(40)
    assert backbone.executor_name == "fused"
    assert torch.equal(logits_of(backbone, ids, Way([1, 30, 9])), logits_of(backbone, ids))


@needs_compiler
def test_wrong_routing_of_rows_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = shares_of
    monkeypatch.setattr(recipe, "shares_of", lambda *args: replace(original(*args), each=1))
    backbone = Backbone(tiny_model("mixtral", torch.float32))
    assert backbone.executor_name == "generic"
    assert "layer 1 comes out differently" in backbone.refusals["fused"]


@needs_compiler
def test_a_model_in_training_mode_is_examined_in_evaluation_mode() -> None:
    """Dropout would make a layer without rotations look like a rotated one."""
    model: Any = tiny_model("smollm3", torch.float32).train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    assert Backbone(model).executor_name == "fused"
    assert model.training


def test_unknown_rotations_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = parts_of(make_model("llama"))
    attention: Any = parts.layers[0].self_attn
    module = "transformers.models.llama.modeling_llama.apply_rotary_pos_emb"

    def third(queries: Tensor, keys: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return queries * cos[:, None] ** 3, keys * sin[:, None]

    kind = attention_types(parts.config)[0]
    assert rotation_of(parts, attention, kind, 8, torch.float32) is not None
    monkeypatch.setattr(module, third)
    with pytest.raises(ValueError, match="rotated in an unknown way"):
        rotation_of(parts, attention, kind, 8, torch.float32)
