"""The decoder cut open gives the bits of the whole; what cannot be cut is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from torch import Tensor
from transformers import PreTrainedModel

from selfspec.api.speculator import wrap
from selfspec.decoding.state import HiddenCache
from selfspec.decoding.work import alone
from selfspec.errors import InvalidPrompt, UnsupportedModel
from selfspec.model.backbone import Backbone
from selfspec.model.kv import Lease
from selfspec.model.parts import captured_outputs
from tests.models import BREADTH, FAMILIES, VOCAB_SIZE, make_model, random_ids


@pytest.mark.parametrize(
    ("dtype", "attn"), [(torch.float32, "sdpa"), (torch.bfloat16, "eager")], ids=str
)
@pytest.mark.parametrize("family", FAMILIES | BREADTH)
def test_segments_give_the_bits_of_the_whole(family: str, dtype: torch.dtype, attn: str) -> None:
    model = make_model(family, dtype, attn)
    backbone = Backbone(model, executor="generic")
    assert backbone.mixing is None
    ids = random_ids(30)  # longer than the sliding windows
    hidden = HiddenCache(backbone, Lease(backbone.num_layers), (2, 3))
    with torch.inference_mode(), captured_outputs(list(backbone.layers)) as outputs:
        expected = model(ids).logits.float()
        layers = dict(outputs)
        hidden.push(backbone.embed(ids[0]))
        for boundary, depth in enumerate((2, 3, 6)):
            assert torch.equal(alone(hidden.advance(boundary)), layers[depth - 1][0])
        assert torch.equal(backbone.logits(hidden.rows(3)), expected[0])


def test_layers_dispatched_over_devices_run_as_before(model: PreTrainedModel) -> None:
    ids = random_ids(12)
    expected = wrap(model, heads="logit-lens").generate(ids, max_new_tokens=10).token_ids
    split = make_model("llama")
    parts = ("embed_tokens", "norm", "rotary_emb", *(f"layers.{layer}" for layer in range(6)))
    places = {"lm_head": "cpu"} | {f"model.{part}": "cpu" for part in parts}
    dispatch_model(split, places, force_hooks=True)
    assert hasattr(split.model.layers[3], "_hf_hook")
    speculator = wrap(split, heads="logit-lens", drafter="exit:layers=2/4,threshold=0.05")
    answer = speculator.generate(ids, max_new_tokens=10)
    assert answer.token_ids == expected
    assert answer.stats.drafted > 0


def test_wrapping_and_generating_leave_the_model_as_it_was() -> None:
    model = make_model("llama").train()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config, generation = model.config.to_dict(), model.generation_config.to_dict()
    speculator = wrap(model, heads="logit-lens", drafter="exit:threshold=0.05")
    speculator.generate(random_ids(5), max_new_tokens=5)
    assert model.training
    assert model.config.to_dict() == config
    assert model.generation_config.to_dict() == generation
    assert all(torch.equal(weights[name], t) for name, t in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_decoder_that_does_more_is_refused_with_the_layer_and_the_difference() -> None:
    model: Any = make_model("llama")
    layer, inside = model.model.layers[3], list[bool]()
    right, whole = layer.forward, model.model.forward

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        return right(*args, **kwargs) * (1.5 if inside else 1.0)

    def outer(*args: Any, **kwargs: Any) -> Any:
        inside.append(True)
        try:
            return whole(*args, **kwargs)
        finally:
            inside.clear()

    layer.forward, model.model.forward = forward, outer
    with pytest.raises(UnsupportedModel, match=r"at layer 4 by up to [0-9.e+-]+"):
        Backbone(model)


ROPE: dict[str, Any] = {"rope_theta": 10000.0, "factor": 2.0}
ROPE["original_max_position_embeddings"] = 128


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": ROPE | more | {"rope_type": kind}}


@pytest.mark.parametrize(
    ("made", "changed", "words"),
    [
        (rope("dynamic"), {}, "dynamic"),
        (rope("longrope", short_factor=[1.0] * 4, long_factor=[2.0] * 4), {}, "longrope"),
        ({}, {"layer_types": ["full_attention", "linear_attention"] * 3}, "linear_attention"),
        ({}, {"num_kv_shared_layers": 2}, "shares keys and values"),
        ({}, {"num_hidden_layers": 12}, "has 6 layers, expected the 12 of its config"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_a_config_says_of_its_layers_is_refused(
    made: dict[str, Any], changed: dict[str, Any], words: str
) -> None:
    model = make_model("qwen2", **made)
    for field, value in changed.items():
        setattr(model.config, field, value)
    with pytest.raises(UnsupportedModel, match=words):
        Backbone(model)


def test_rope_of_fixed_frequencies_is_run() -> None:
    Backbone(make_model("llama", **rope("llama3", low_freq_factor=1.0, high_freq_factor=4.0)))


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        (torch.empty(1, 0, dtype=torch.long), "empty"),
        (torch.tensor([[3, VOCAB_SIZE]]), f"token id {VOCAB_SIZE} is outside"),
        (torch.tensor([[-1, 3]]), "token id -1 is outside"),
    ],
)
def test_prompts_that_do_not_fit_are_refused(backbone: Backbone, ids: Tensor, reason: str) -> None:
    with pytest.raises(InvalidPrompt, match=reason):
        backbone.check_ids(ids)
