"""A model that was changed after it was wrapped is refused at the next request, in one line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from eval.memory import resident
from selfspec.api.speculator import Speculator, wrap
from selfspec.errors import ModelChanged
from selfspec.model.fingerprint import PARTS, ModelWatch
from selfspec.model.parts import captured_outputs
from tests.models import BREADTH, FAMILIES, make_model, random_ids


def mlp(model: Any) -> Any:
    return model.model.layers[3].mlp


def set_data(weight: Tensor) -> None:
    weight.data = weight.data.clone()


class Louder(nn.Linear):
    """Of another kind."""


MLP, UP = "model.layers.3.mlp", "model.layers.3.mlp.up_proj.weight"
CHANGES: list[tuple[Callable[[Any], object], str]] = [
    (lambda m: m.to(torch.bfloat16), "embed_tokens.weight was cast from torch.float32 to torch.bf"),
    (lambda m: m.to(torch.float16).to(torch.float32), "weight was"),  # some lie where they were
    (lambda m: m.to("meta"), "was"),
    (lambda m: mlp(m).up_proj.weight.detach().add_(0.01), f"{UP} was changed"),
    (lambda m: mlp(m).up_proj.weight.data.add_(0.01), f"{UP} was changed"),
    (lambda m: set_data(mlp(m).up_proj.weight), f"{UP} was replaced"),
    (lambda m: setattr(mlp(m).up_proj, "weight", nn.Parameter(torch.ones(64, 32))), "was replaced"),
    (lambda m: m.lm_head.weight.data.mul_(2), "lm_head.weight was changed"),
    (lambda m: m.model.rotary_emb.inv_freq.mul_(2), "model.rotary_emb.inv_freq was changed"),
    (lambda m: mlp(m).register_buffer("scale", torch.ones(1)), f"{MLP} has other weights"),
    (lambda m: setattr(mlp(m), "up_proj", nn.Linear(32, 64)), f"{MLP} has other modules"),
    (lambda m: mlp(m).register_forward_hook(lambda _, __, out: out * 2), f"{MLP} has other hooks"),
    (lambda m: setattr(mlp(m), "forward", torch.zeros_like), f"the forward of {MLP} was replaced"),
    (lambda m: setattr(m.lm_head, "bias", nn.Parameter(torch.ones(96))), "lm_head has other weigh"),
    (lambda m: setattr(m.lm_head, "__class__", Louder), "lm_head is a Louder, it was a Linear"),
    # which no Llama has, and Cohere's are asked for
    (lambda m: setattr(m.config, "logit_scale", 2.0), "model has logit_scale, which it had not"),
    (lambda m: m.config.rope_parameters.update(rope_theta=1.0), "rope_parameters of config of the"),
]


@pytest.mark.parametrize(("change", "found"), CHANGES)
def test_each_change_is_named(change: Callable[[Any], object], found: str) -> None:
    model = make_model("llama", tie_word_embeddings=False)
    watch = ModelWatch(model)
    assert watch.change() is None
    change(model)
    assert found in str(watch.change())


def places(model: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The attributes of all modules, and of the config that they share."""
    for path, module in model.named_modules():
        yield path or "the model", vars(module)
    yield "config of the model", vars(model.config)


def other(value: Any) -> Any:
    """Something else of the same kind, or an object where there is none."""
    if isinstance(value, bool):
        return not value
    if value is None or isinstance(value, int | float):
        return 1 + (value or 0)
    if isinstance(value, dict):
        return {**value, "other": 1}
    return type(value)([*value, 1]) if isinstance(value, list | tuple) else object()


HELD = vars(nn.Module()).keys() - {"training"} | {"_heterogeneity_spec"}
"""What holds modules, weights and hooks, and that without which no config can be read."""


@pytest.mark.parametrize("family", [*FAMILIES, *BREADTH])
def test_an_attribute_that_decides_a_logit_is_watched(family: str) -> None:
    model: Any = make_model(family, num_hidden_layers=2)
    watch, ids = ModelWatch(model), random_ids(12)
    expected = model(ids)[0].detach()
    noticed = 0
    for path, own in places(model):
        for name in own.keys() - HELD:
            value, own[name] = own[name], other(own[name])
            found = watch.change()
            if found is None:
                assert torch.equal(model(ids)[0], expected), f"{name} of {path}"
            else:
                assert name in found
                assert path in found
                noticed += 1
            own[name] = value
            assert watch.change() is None
    assert noticed > 80


def _view(weight: Tensor) -> Any:
    """As numpy sees it: what is written there moves no counter."""
    return weight.detach().view(torch.int16).numpy()


WRITES: dict[str, Callable[[Tensor, int], object]] = {
    "a row multiplied": lambda weight, at: weight.data[at].mul_(50),
    "a row of another": lambda weight, at: weight.data[at].copy_(weight.data[at - 1]),
    "rows zeroed": lambda weight, at: weight.data[at : at + 9].zero_(),
    "a column set": lambda weight, at: weight.data[:, at % weight.shape[1]].fill_(7),
    "all but a row": lambda weight, at: weight.data[at:].neg_(),
    "half of each row": lambda weight, _: weight.data[:, ::2].neg_(),
    "a row through numpy": lambda weight, at: _view(weight)[at].fill(3),
    "rows swapped": lambda weight, at: weight.data[[at, at - 1]].copy_(weight.data[[at - 1, at]]),
}


@settings(max_examples=40)
@given(
    st.integers(2, 400),
    st.integers(1, 60),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.data(),
)
def test_a_row_or_a_column_that_no_counter_saw_is_found_in_time(
    rows: int, width: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    model = nn.ModuleList([nn.Linear(4 * width, rows, dtype=dtype) for _ in range(2)])
    watch = ModelWatch(model)
    assert [watch.change() for _ in range(PARTS)] == [None] * PARTS
    write = data.draw(st.sampled_from(sorted(WRITES)))
    weight: Any = model[1].weight
    before = weight.detach().clone()
    WRITES[write](weight, data.draw(st.integers(1, rows - 1)))
    if not torch.equal(before, weight):
        assert "1.weight was changed" in [watch.change() for _ in range(PARTS)]


def test_each_number_of_a_vector_is_compared() -> None:
    for size in (1, 3, 17, 33, 1001):
        norm = nn.LayerNorm(size, dtype=torch.bfloat16)
        for at in {0, size // 2, size - 1}:
            watch = ModelWatch(norm)
            norm.weight.data[at] += 1
            assert "weight was changed" in [watch.change() for _ in range(PARTS)]


@pytest.fixture
def mapped(tmp_path: Path) -> nn.Module:
    """8,192 rows of ones: a private mapping of a file, as safetensors makes it; none are read."""
    rows, width = 1 << 13, 1 << 10  # a page that is read brings its neighbours, up to two megabytes
    path = tmp_path / "weights"
    path.write_bytes(torch.ones(rows * width).numpy().tobytes())
    weight = torch.from_file(str(path), shared=False, size=rows * width, dtype=torch.float32)
    module = nn.Linear(1, 1, bias=False)
    module.weight = nn.Parameter(weight.view(rows, width), requires_grad=False)
    return module


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no kernel tells")
def test_one_number_of_a_mapped_file_is_found_and_nothing_is_read_for_that(
    mapped: nn.Linear,
) -> None:
    before = resident("RssFile")
    watch = ModelWatch(mapped)
    assert [watch.change() for _ in range(PARTS)] == [None] * PARTS
    assert resident("RssFile") - before < mapped.weight.nbytes / 4e6
    mapped.weight.data[700, 3] = 2
    assert "weight was changed" in [watch.change() for _ in range(PARTS)]


def test_a_mapped_file_is_read_where_no_kernel_tells(
    mapped: nn.Linear, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("selfspec.model.weights._PAGES", tmp_path / "absent")
    watch = ModelWatch(mapped)
    mapped.weight.data[700] = 2
    assert "weight was changed" in [watch.change() for _ in range(PARTS)]


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
            with pytest.raises(
                ModelChanged, match=r"lm_head has other hooks\. Wrap the model again"
            ):
                run()
    finally:
        handle.remove()
    speculator.generate(prompt, max_new_tokens=2)


def test_a_changed_draft_model_is_refused() -> None:
    small: Any = make_model("llama", num_hidden_layers=2)
    speculator = wrap(make_model("llama"), draft_model=small)
    speculator.generate(random_ids(5), max_new_tokens=2)
    small.lm_head.weight.data += 1
    with pytest.raises(ModelChanged, match=r"weight was changed"):
        speculator.generate(random_ids(5), max_new_tokens=2)


def test_weights_made_in_inference_mode_count_no_changes_and_are_watched() -> None:
    with torch.inference_mode():
        model: Any = make_model("llama")
        watch = ModelWatch(model)
        assert watch.change() is None
        model.lm_head.weight.mul_(2)
    assert watch.change() is not None


# --- low-rank adapters


class Adapted(nn.Module):
    """A linear layer and what adapters add to it, in the containers that PEFT has."""

    def __init__(self, base_layer: nn.Linear, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.base_layer = base_layer
        self.lora_A: Any = nn.ModuleDict()
        self.lora_B: Any = nn.ModuleDict()
        self.scaling = {"first": 2.0, "second": 0.5}
        for name in self.scaling:
            self.lora_A[name] = nn.Linear(base_layer.in_features, 4, bias=False)
            self.lora_B[name] = nn.Linear(4, base_layer.out_features, bias=False)
        for weight in [*self.lora_A.parameters(), *self.lora_B.parameters()]:
            nn.init.normal_(weight, std=0.3, generator=generator)
        self.to(base_layer.weight.dtype)
        self._active_adapter = ["first"]
        self._disable_adapters = False

    def forward(self, rows: Tensor) -> Tensor:
        answer: Tensor = self.base_layer(rows)
        for name in () if self._disable_adapters else self._active_adapter:
            added: Tensor = self.lora_B[name](self.lora_A[name](rows))
            answer = answer + self.scaling[name] * added
        return answer


def adapted() -> Any:
    model: Any = make_model("llama", torch.float64)
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj, index)
        layer.mlp.down_proj = Adapted(layer.mlp.down_proj, 100 + index)
    return model.eval()


def each(change: Callable[[Adapted], object]) -> Callable[[Any], None]:
    """A change of all adapted layers but the first."""

    def run(model: Any) -> None:
        for module in [one for one in model.modules() if isinstance(one, Adapted)][1:]:
            change(module)

    return run


ADAPTER_CHANGES: dict[str, Callable[[Any], None]] = {
    "switched": each(lambda layer: setattr(layer, "_active_adapter", ["second"])),
    "joined": each(lambda layer: layer._active_adapter.append("second")),
    "disabled": each(lambda layer: setattr(layer, "_disable_adapters", True)),
    "scaled": each(lambda layer: layer.scaling.update(first=3.0)),
    "removed": each(lambda layer: layer.lora_A.pop("second")),
    "fitted": each(lambda layer: layer.lora_B["first"].weight.data.mul_(2)),
}


def test_the_text_is_that_of_the_adapted_model() -> None:
    model, ids = adapted(), random_ids(9)
    ADAPTER_CHANGES["switched"](model)
    speculator = wrap(model, heads="logit-lens", drafter="exit:threshold=0.01")
    answer = speculator.generate(ids, max_new_tokens=30, never_slower=False)
    expected = model.generate(ids, max_new_tokens=30, do_sample=False)
    assert answer.token_ids == expected[0, 9:].tolist()
    assert answer.stats.drafted > 0


@pytest.mark.parametrize("change", ADAPTER_CHANGES)
def test_a_change_of_adapters_after_wrapping_is_noticed(change: str) -> None:
    model = adapted()
    watch = ModelWatch(model)
    assert watch.change() is None
    ADAPTER_CHANGES[change](model)
    assert watch.change() is not None
