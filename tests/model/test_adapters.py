"""Low-rank adapters in a model: its text is Hugging Face's, and what is done to them is noticed.

PEFT's own layers are stood for by one with their attributes: names of adapters in a list, their
scalings in a dict, and modules in two dicts of modules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from selfspec.api.speculator import wrap
from selfspec.model.watch import ModelWatch
from tests.models import make_model, random_ids


class Adapted(nn.Module):
    """A linear layer and what adapters add to it."""

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


CHANGES: dict[str, Callable[[Any], None]] = {
    "switched": each(lambda layer: setattr(layer, "_active_adapter", ["second"])),
    "joined": each(lambda layer: layer._active_adapter.append("second")),
    "disabled": each(lambda layer: setattr(layer, "_disable_adapters", True)),
    "scaled": each(lambda layer: layer.scaling.update(first=3.0)),
    "removed": each(lambda layer: layer.lora_A.pop("second")),
    "fitted": each(lambda layer: layer.lora_B["first"].weight.data.mul_(2)),
}


def test_the_text_is_that_of_the_adapted_model() -> None:
    model, ids = adapted(), random_ids(9)
    CHANGES["switched"](model)
    speculator = wrap(model, heads="logit-lens", drafter="exit:threshold=0.01")
    answer = speculator.generate(ids, max_new_tokens=30, never_slower=False)
    expected = model.generate(ids, max_new_tokens=30, do_sample=False)
    assert answer.token_ids == expected[0, 9:].tolist()
    assert answer.stats.drafted > 0


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_adapters_after_wrapping_is_noticed(change: str) -> None:
    model = adapted()
    watch = ModelWatch(model)
    assert watch.change() is None
    CHANGES[change](model)
    assert watch.change() is not None
