"""A model of transformers made of a config, with weights that somebody else brings.

Comes in: a config, and what gives the weight of a name. Goes out: a model in evaluation mode that
took no memory for weights of its own. Called by `gguf_blocks` and `grouped`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from selfspec.errors import InvalidData, LacksWeights, first_line

Weight = Callable[[str, tuple[int, ...]], Tensor | None]
"""The weight of a parameter's name and shape; None where there is none."""

_OUTPUT = "lm_head.weight"


def assembled(
    config: PreTrainedConfig, dtype: torch.dtype, attention: str, weight: Weight
) -> PreTrainedModel:
    """The model that `config` describes. Raises InvalidData where it makes none.

    And LacksWeights, which is one, where nobody brings a weight.
    """
    model = _without_weights(config, dtype, attention)
    missing = []
    for name, shape in [(name, tuple(empty.shape)) for name, empty in model.named_parameters()]:
        if (found := weight(name, shape)) is None:
            missing.append(name)
        else:
            _place(model, name, nn.Parameter(found, requires_grad=False))
    if config.tie_word_embeddings:
        missing = [name for name in missing if name != _OUTPUT]
        embedding: Any = model.get_input_embeddings()
        _place(model, _OUTPUT, embedding.weight)
    if missing:
        raise LacksWeights(f"it lacks {len(missing)} weights, {missing[0]} among them")
    model.eval()
    return model


def _without_weights(
    config: PreTrainedConfig, dtype: torch.dtype, attention: str
) -> PreTrainedModel:
    """The model that a config describes; its parameters are nowhere yet."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    make: Any = AutoModelForCausalLM.from_config  # untyped
    try:
        with init_empty_weights(include_buffers=False), no_init_weights():
            model: PreTrainedModel = make(config, dtype=dtype, attn_implementation=attention)
    except Exception as error:  # an odd config makes transformers fail anywhere, with anything
        raise InvalidData(f"what it says makes no model: {first_line(error)}") from error
    return model


def _place(model: nn.Module, name: str, weight: nn.Parameter) -> None:
    owner, _, leaf = name.rpartition(".")
    model.get_submodule(owner)._parameters[leaf] = weight
