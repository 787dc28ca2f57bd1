"""A model of transformers made of a config, with weights that somebody else brings.

Comes in: a config, and what gives the weight of a name, as `Tensors` of a folder does. Goes out: a
model in evaluation mode that took no memory for weights of its own. Called by `gguf_blocks` and
`grouped`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from selfspec.errors import InvalidData, LacksWeights, first_line
from selfspec.hub.pretrained import indexed


class Tensors:
    """The tensors of a folder, by name."""

    def __init__(self, folder: Path) -> None:
        """Raises InvalidData for an index that is invalid, or names files that are not there."""
        from safetensors import safe_open

        self._file_of: dict[str, Any] = {}
        one = folder / "model.safetensors"
        named = [one] if one.is_file() else indexed(folder)  # as transformers finds them
        for file in named or sorted(folder.glob("*.safetensors")):
            try:
                opened = safe_open(file, framework="pt")
            except Exception as error:  # of its own kinds
                raise InvalidData(f"cannot read {file}: {error}") from error
            self._file_of |= dict.fromkeys(opened.keys(), opened)  # type: ignore[no-untyped-call]

    def __contains__(self, name: object) -> bool:
        return name in self._file_of

    def get(
        self,
        name: str,
        shape: tuple[int | None, ...] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """A tensor of this shape, None standing for any length. Raises InvalidData."""
        if name not in self:
            raise InvalidData(f"it lacks {name}")
        found: Tensor = self._file_of[name].get_tensor(name)
        if shape is not None:
            filled = [
                has if want is None else want for want, has in zip(shape, found.shape, strict=False)
            ]
            if filled != list(found.shape) or len(shape) != found.dim():
                asked = ", ".join("any" if length is None else str(length) for length in shape)
                raise InvalidData(f"{name} is {list(found.shape)}, expected [{asked}]")
        if dtype is not None and found.dtype != dtype:
            raise InvalidData(f"{name} holds {found.dtype}, expected {dtype}")
        return found


Weight = Callable[[str, tuple[int, ...]], Tensor | None]
"""The weight of a parameter's name and shape; None where there is none."""

_OUTPUT = "lm_head.weight"


def assembled(
    config: PreTrainedConfig, dtype: torch.dtype, attention: str, weight: Weight
) -> PreTrainedModel:
    """The model that `config` describes. Raises InvalidData where it makes none.

    And LacksWeights, which is one, where nobody brings a weight.
    """
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    make: Any = AutoModelForCausalLM.from_config  # untyped
    try:
        with init_empty_weights(include_buffers=False), no_init_weights():
            model: PreTrainedModel = make(config, dtype=dtype, attn_implementation=attention)
    except Exception as error:  # an odd config makes transformers fail anywhere, with anything
        raise InvalidData(f"what it says makes no model: {first_line(error)}") from error
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


def _place(model: nn.Module, name: str, weight: nn.Parameter) -> None:
    owner, _, leaf = name.rpartition(".")
    model.get_submodule(owner)._parameters[leaf] = weight
