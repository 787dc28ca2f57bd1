"""Whether what was given as a model is one.

Comes in: what a caller gave. Goes out: nothing, or InvalidOption, in one line that says what was
found, what was expected and what to do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from selfspec.errors import InvalidOption


def check_model(model: Any, name: str = "model") -> None:
    """Raise InvalidOption unless `model` is a causal language model with weights."""
    config = getattr(model, "config", None)
    known = isinstance(model, nn.Module) and callable(getattr(model, "generate", None))
    if not known or not hasattr(config, "get_text_config"):
        raise InvalidOption(
            f"{name} is {kind_of(model)}, expected a causal language model of transformers. Load "
            "one by name with selfspec.load(...), or with AutoModelForCausalLM"
        )
    if all(weight.is_meta and not _offloaded(part) for part, weight in _weights(model)):
        raise InvalidOption(
            f"{name} has no weights (they are on the meta device), expected them in memory. Load "
            "it with from_pretrained, or with selfspec.load(...)"
        )


def _weights(model: nn.Module) -> Iterator[tuple[nn.Module, Tensor]]:
    """Each weight with the module that has it."""
    return ((part, weight) for part in model.modules() for weight in part.parameters(recurse=False))


def _offloaded(part: nn.Module) -> bool:
    """Whether accelerate brings the weights when the module is called."""
    return hasattr(part, "_hf_hook")


def kind_of(value: Any) -> str:
    """The type of what was given, in words."""
    name = type(value).__name__
    return f"a class, {value.__name__}" if isinstance(value, type) else f"of type {name}"
