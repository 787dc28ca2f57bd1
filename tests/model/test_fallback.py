"""What another executor cannot run, the model's own modules do; the rest is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from torch import Tensor, nn

from selfspec.api.speculator import wrap
from selfspec.errors import UnsupportedModel
from selfspec.model.backbone import Backbone
from selfspec.model.fused import FusedExecutor
from selfspec.model.weights import CompiledLinear
from tests.models import make_model, needs_compiler, random_ids


def same_as_the_model(model: Any, **options: Any) -> Backbone:
    """The backbone of `model`, whose answer is Hugging Face's."""
    speculator, ids = wrap(model, **options), random_ids(9)
    found = speculator.generate(ids, max_new_tokens=12).token_ids
    expected = model.generate(input_ids=ids, max_new_tokens=12, do_sample=False)
    assert found == expected[0, 9:].tolist()
    return speculator.backbone


@needs_compiler
def test_any_failure_of_compiled_weights_leaves_the_models_own_modules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: Any, **__: Any) -> CompiledLinear:
        raise NotImplementedError("no such kernel\nand a long tale")

    monkeypatch.setattr(CompiledLinear, "of", fails)
    backbone = Backbone(make_model("llama"))
    assert backbone.executor_name == "generic"
    assert "no such kernel" in backbone.refused["fused"]
    assert "tale" not in backbone.refused["fused"]
    with pytest.raises(UnsupportedModel, match=r"no such kernel.*choose generic"):
        Backbone(make_model("llama"), executor="fused")


def test_a_failure_while_it_runs_does_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(FusedExecutor, "run", fails)
    assert set(same_as_the_model(make_model("llama")).refused) == {"fused"}


class Hidden(Tensor):
    """Weights that say they are a tensor and cannot be joined, as quantised ones."""

    @staticmethod
    def __new__(cls, plain: Tensor) -> Hidden:
        return Tensor._make_wrapper_subclass(cls, plain.shape, dtype=plain.dtype)

    def __init__(self, plain: Tensor) -> None:
        self.plain = plain

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # as the documentation of torch has it
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten.detach.default:
            return cls(args[0].plain)
        aten = torch.ops.aten
        views = (aten.t.default, aten.expand.default, aten.view.default)
        if function not in (*views, aten.mm.default, aten.bmm.default):
            raise NotImplementedError(f"{function} of hidden weights")
        hidden = isinstance(args[0], Hidden)
        plain = [one.plain if isinstance(one, Hidden) else one for one in args]
        found = function(*plain, **kwargs or {})
        return cls(found) if hidden and function in views else found


def hide(layer: Any) -> None:
    layer.weight = nn.Parameter(Hidden(layer.weight.detach()), requires_grad=False)


def test_weights_of_another_kind_run_as_they_are() -> None:
    model: Any = make_model("llama", tie_word_embeddings=False)
    for layer in model.model.layers:
        hide(layer.mlp.up_proj)
    backbone = same_as_the_model(model, heads="logit-lens", drafter="exit:threshold=0.05")
    assert "weights are of type Hidden" in backbone.refused["fused"]
    hide(model.lm_head)
    backbone = same_as_the_model(model, drafter="ngram")
    with pytest.raises(UnsupportedModel, match=r"quantised \(Hidden\).*drafter='ngram'"):
        _ = backbone.unembedding


class NeedsVersions(nn.Linear):
    """Cannot run in inference mode."""

    def forward(self, rows: Tensor) -> Tensor:
        if torch.is_inference_mode_enabled():
            raise RuntimeError("Inference tensors do not track version counter.")
        return super().forward(rows)


def test_layers_that_cannot_run_in_inference_mode_run_without_it() -> None:
    model: Any = make_model("llama")
    for layer in model.model.layers:
        layer.mlp.up_proj.__class__ = NeedsVersions
    same_as_the_model(model, heads="logit-lens", drafter="exit:threshold=0.05")
    same_as_the_model(model, drafter="ngram")


def test_an_unembedding_of_another_dtype_behind_a_hook_runs() -> None:
    model: Any = make_model("llama", torch.bfloat16, tie_word_embeddings=False)
    model.lm_head.float()
    model.lm_head.register_forward_pre_hook(lambda _, args: (args[0].float(),))
    backbone = same_as_the_model(model, heads="logit-lens", drafter="exit:threshold=0.05")
    assert "lm_head has hooks" in backbone.refused["fused"]


@pytest.mark.parametrize("part", ["model.embed_tokens", "lm_head", ""])
def test_offloaded_parts_run(part: str) -> None:
    model: Any = make_model("llama", tie_word_embeddings=False)
    cpu_offload(model.get_submodule(part), execution_device=torch.device("cpu"))
    backbone = same_as_the_model(model, drafter="ngram")
    assert backbone.device.type == "cpu"
    if part != "model.embed_tokens":
        with pytest.raises(UnsupportedModel, match="lm_head's weight, which is offloaded"):
            wrap(model, heads="logit-lens")


def test_tokens_of_the_models_own_are_refused_by_name() -> None:
    """Prompt tuning puts vectors of its own in front of the text."""
    model: Any = make_model("llama")
    whole = model.forward

    def prompted(ids: Tensor, position_ids: Any, **cache: Any) -> Any:
        rows = torch.cat([torch.ones(1, 5, 32), model.model.embed_tokens(ids)], dim=1)
        return whole(inputs_embeds=rows, **cache)

    model.forward = prompted
    with pytest.raises(UnsupportedModel, match=r"runs 12 rows for 7 tokens.*own generate"):
        Backbone(model)


def test_a_model_that_breaks_is_refused_in_one_line() -> None:
    model: Any = make_model("llama")
    model.model.layers[2].forward = lambda *_, **__: (_ for _ in ()).throw(KeyError("a\nb"))
    with pytest.raises(UnsupportedModel, match="does not run layer by layer: 'a") as caught:
        Backbone(model)
    assert "\n" not in str(caught.value)
