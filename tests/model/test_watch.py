"""A model that was changed after it was wrapped is refused at the next request, in one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from selfspec.api.speculator import Speculator, wrap
from selfspec.errors import ModelChanged
from selfspec.model.hooks import captured_outputs
from selfspec.model.watch import ModelWatch
from tests.models import PACKED_EXECUTORS, make_model, random_ids


def layer(model: Any) -> Any:
    return model.model.layers[3]


def _cast(model: Any) -> None:
    model.to(torch.bfloat16)


def _cast_and_back(model: Any) -> None:
    model.to(torch.float16).to(torch.float32)


def _moved(model: Any) -> None:
    model.to("meta")


@torch.no_grad()
def _stepped(model: Any) -> None:
    layer(model).mlp.up_proj.weight.add_(0.01)


def _behind_its_back(model: Any) -> None:
    layer(model).mlp.up_proj.weight.data += 0.01


def _storage(model: Any) -> None:
    weight = layer(model).mlp.up_proj.weight
    weight.data = weight.data.clone()


def _parameter(model: Any) -> None:
    layer(model).mlp.up_proj.weight = nn.Parameter(layer(model).mlp.up_proj.weight.clone())


def _unembedding(model: Any) -> None:
    model.lm_head.weight.data *= 2


def _buffer(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(2)


def _added(model: Any) -> None:
    layer(model).mlp.register_buffer("scale", torch.ones(1))


def _module(model: Any) -> None:
    layer(model).mlp.up_proj = nn.Linear(32, 64, bias=False)


def _hook(model: Any) -> None:
    layer(model).mlp.register_forward_hook(lambda _, __, output: output * 2)


def _forward(model: Any) -> None:
    layer(model).mlp.forward = torch.zeros_like


def _switch(model: Any) -> None:
    layer(model).self_attn.scaling = 1.0


CHANGES: list[tuple[Callable[[Any], None], str]] = [
    (_cast, "model.embed_tokens.weight was cast from torch.float32 to torch.bfloat16"),
    (_cast_and_back, "weight was"),  # some find their old place in memory free again
    (_moved, "was"),
    (_stepped, "model.layers.3.mlp.up_proj.weight was changed"),
    (_behind_its_back, "model.layers.3.mlp.up_proj.weight was changed"),
    (_storage, "model.layers.3.mlp.up_proj.weight was replaced"),
    (_parameter, "model.layers.3.mlp.up_proj.weight was replaced"),
    (_unembedding, "lm_head.weight was changed"),
    (_buffer, "model.rotary_emb.inv_freq was changed"),
    (_added, "model.layers.3.mlp has other weights"),
    (_module, "model.layers.3.mlp has other modules"),
    (_hook, "model.layers.3.mlp has other hooks"),
    (_forward, "the forward of model.layers.3.mlp was replaced"),
    (_switch, "scaling of model.layers.3.self_attn was changed"),
]


@pytest.mark.parametrize(("change", "found"), CHANGES, ids=[one.__name__ for one, _ in CHANGES])
def test_each_change_is_named(change: Callable[[Any], None], found: str) -> None:
    model = make_model("llama", tie_word_embeddings=False)
    watch = ModelWatch(model)
    assert watch.change() is None
    change(model)
    assert found in str(watch.change())


@pytest.mark.parametrize("executor", ["generic", "cuda-graph", *PACKED_EXECUTORS])
def test_a_cast_after_wrapping_is_refused_before_anything_is_read(executor: str) -> None:
    model = make_model("llama")
    speculator = wrap(model, heads="logit-lens", executor=executor)
    speculator.generate(random_ids(5), max_new_tokens=3)
    model.to(torch.bfloat16)  # type: ignore[arg-type]  # annotated otherwise upstream
    with pytest.raises(ModelChanged, match="Wrap the model again"):
        speculator.generate(random_ids(5), max_new_tokens=3)


@pytest.fixture(scope="module")
def speculator() -> Speculator:
    return wrap(make_model("llama"), heads="logit-lens")


def test_what_changes_nothing_is_no_change(speculator: Speculator) -> None:
    model: Any = speculator.model
    model.train()
    speculator.generate(random_ids(5), max_new_tokens=3)
    model.eval()
    model(random_ids(5), output_hidden_states=True)  # leaves idle hooks
    model.generate(random_ids(5), max_new_tokens=3)
    model.requires_grad_(requires_grad=False)
    with captured_outputs(list(model.model.layers)):
        speculator.generate(random_ids(5), max_new_tokens=3)


def test_every_way_in_asks(speculator: Speculator) -> None:
    session = speculator.session()
    prompt, model = random_ids(5), speculator.model
    handle = model.lm_head.register_forward_hook(lambda *_: None)
    try:
        for run in (
            lambda: speculator.generate(prompt, max_new_tokens=2),
            lambda: speculator.generate_batch(prompt, max_new_tokens=2),
            lambda: speculator.stream(prompt, max_new_tokens=2),
            lambda: session.generate(prompt, max_new_tokens=2),
            lambda: model.generate(prompt, max_new_tokens=2, custom_generate=speculator.hf()),  # type: ignore[operator]  # typed as Tensor | Module upstream
        ):
            with pytest.raises(ModelChanged, match="lm_head has other hooks"):
                run()
    finally:
        handle.remove()
    speculator.generate(prompt, max_new_tokens=2)


def test_a_changed_draft_model_is_refused() -> None:
    small = make_model("llama", num_hidden_layers=2)
    speculator = wrap(make_model("llama"), draft_model=small)
    speculator.generate(random_ids(5), max_new_tokens=2)
    _stepped_small: Any = small
    _stepped_small.lm_head.weight.data += 1
    with pytest.raises(ModelChanged, match=r"weight was changed"):
        speculator.generate(random_ids(5), max_new_tokens=2)


def test_weights_made_in_inference_mode_count_no_changes_and_are_watched() -> None:
    with torch.inference_mode():
        model: Any = make_model("llama")
        watch = ModelWatch(model)
        assert watch.change() is None
        model.lm_head.weight.mul_(2)
    assert watch.change() is not None
