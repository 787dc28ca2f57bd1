"""Hidden states of a normal forward pass: the right ones, and nothing left behind."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from selfspec.model.backbone import Backbone
from selfspec.model.parts import captured_outputs
from tests.models import random_ids


class Pair(nn.Module):
    """Returns a tuple, as decoder layers of some families do."""

    def forward(self, hidden: Tensor) -> tuple[Tensor, str]:
        """[..] -> twice that, and something else."""
        return 2 * hidden, "other"


def hook_count(modules: list[nn.Module]) -> int:
    return sum(len(module._forward_hooks) for module in modules)


@torch.inference_mode()
def test_each_layers_output_is_its_hidden_state(model: PreTrainedModel, backbone: Backbone) -> None:
    with captured_outputs(list(backbone.layers)) as outputs:
        expected = model(random_ids(9), output_hidden_states=True).hidden_states
    assert sorted(outputs) == list(range(backbone.num_layers))
    # transformers' last entry is behind the final norm, ours is in front of it
    for layer in range(1, backbone.num_layers):
        assert torch.equal(outputs[layer - 1], expected[layer])
    assert torch.equal(model.get_decoder().norm(outputs[backbone.num_layers - 1]), expected[-1])


def test_keys_count_the_given_modules_not_the_models() -> None:
    modules = [nn.Identity(), nn.Identity(), nn.Identity()]
    with captured_outputs([modules[2], modules[0]]) as outputs:
        modules[0](torch.tensor(5.0))
        modules[1](torch.tensor(6.0))
        modules[2](torch.tensor(7.0))
    assert {key: value.item() for key, value in outputs.items()} == {0: 7.0, 1: 5.0}


def test_of_a_tuple_the_first_part_is_kept() -> None:
    module = Pair()
    with captured_outputs([module]) as outputs:
        module(torch.tensor(3.0))
    assert outputs[0].item() == 6.0


def test_a_later_pass_replaces_an_earlier_one() -> None:
    module = nn.Identity()
    with captured_outputs([module]) as outputs:
        module(torch.tensor(1.0))
        module(torch.tensor(2.0))
    assert outputs[0].item() == 2.0


def test_the_pass_itself_is_not_changed() -> None:
    module = Pair()
    with captured_outputs([module]):
        output = module(torch.tensor(3.0))
    assert output == (torch.tensor(6.0), "other")


def test_no_hook_is_left_behind() -> None:
    modules: list[nn.Module] = [nn.Identity(), nn.Identity()]
    with captured_outputs(modules) as outputs:
        assert hook_count(modules) == 2
    modules[0](torch.tensor(1.0))
    assert hook_count(modules) == 0
    assert outputs == {}


def test_no_hook_is_left_behind_by_an_error() -> None:
    modules: list[nn.Module] = [nn.Identity()]
    with pytest.raises(RuntimeError, match="in the middle"), captured_outputs(modules):
        raise RuntimeError("in the middle")
    assert hook_count(modules) == 0


def test_no_hook_is_left_behind_if_a_later_module_takes_none() -> None:
    first = nn.Identity()
    with pytest.raises(AttributeError), captured_outputs([first, "no module"]):  # type: ignore[list-item]  # the mistake
        raise AssertionError("not reached")
    assert hook_count([first]) == 0


def test_hooks_of_others_stay() -> None:
    module = nn.Identity()
    module.register_forward_hook(lambda *_: None)
    with captured_outputs([module]):
        pass
    assert hook_count([module]) == 1
