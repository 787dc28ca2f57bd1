"""Whether `wrap` and `load` were given the kinds of things they take.

Comes in: what a caller gave. Goes out: nothing, or InvalidOption or HeadsMismatch, in one line
that says what was found, what was expected and what to do.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from selfspec.errors import HeadsMismatch, InvalidOption
from selfspec.head_types import Unembedding
from selfspec.heads import ExitHeads


def check_model(model: Any, name: str = "model") -> None:
    """Raise InvalidOption unless `model` is a causal language model with weights."""
    config = getattr(model, "config", None)
    known = isinstance(model, nn.Module) and callable(getattr(model, "generate", None))
    if not known or not hasattr(config, "get_text_config"):
        raise InvalidOption(
            f"{name} is {_kind(model)}, expected a causal language model of transformers. Load one "
            "by name with selfspec.load(...), or with AutoModelForCausalLM"
        )
    if all(weight.is_meta and not _offloaded(part) for part, weight in _weights(model)):
        raise InvalidOption(
            f"{name} has no weights (they are on the meta device), expected them in memory. Load "
            "it with from_pretrained, or with selfspec.load(...)"
        )


def check_loading(
    model: object, draft_model: object, heads: object, attention: object, device: object
) -> None:
    """Raise InvalidOption for what `load` cannot take as these."""
    for value, name in ((model, "model"), (draft_model, "draft_model")):
        if value is not None and not (isinstance(value, str | Path) and str(value)):
            found = "empty" if value == "" else _kind(value)
            raise InvalidOption(
                f"{name} is {found}, expected a hub id, a folder or a .gguf file. For a model that "
                "is loaded already use selfspec.wrap(model)"
            )
    _check_heads(heads)
    if not isinstance(attention, str):
        raise InvalidOption(f"attn_implementation is {attention!r}, expected sdpa or eager")
    if device is not None and not isinstance(device, str):
        raise InvalidOption(f"device is {device!r}, expected cpu, cuda, cuda:0 or auto")


def check_wrapping(tokenizer: object, heads: object, draft_model: object) -> None:
    """Raise InvalidOption for what `wrap` cannot take as these; the model is for its Backbone."""
    if tokenizer is not None and not isinstance(tokenizer, PreTrainedTokenizerBase):
        inner = isinstance(getattr(tokenizer, "tokenizer", None), PreTrainedTokenizerBase)
        advice = "Give its .tokenizer" if inner else "Load one with AutoTokenizer, or leave it out"
        raise InvalidOption(
            f"tokenizer is {_kind(tokenizer)}, expected a tokenizer of transformers. {advice}"
        )
    _check_heads(heads)
    if draft_model is not None:
        check_model(draft_model, "draft_model")


def _check_heads(heads: object) -> None:
    """Raise InvalidOption unless it is None, a name, a folder or ExitHeads."""
    if heads is not None and not isinstance(heads, str | Path | ExitHeads):
        raise InvalidOption(
            f"heads are {_kind(heads)}, expected a folder, a name, 'logit-lens' or ExitHeads. "
            "See the names with: selfspec heads"
        )


def check_fit(heads: ExitHeads, num_layers: int, unembedding: Unembedding) -> None:
    """Raise HeadsMismatch unless given heads have the sizes of the model, and its device."""
    config, weight = heads.config, unembedding.weight
    found = (config.num_layers, config.hidden_size, config.vocab_size)
    expected = (num_layers, weight.shape[1], weight.shape[0])
    if found != expected:
        raise HeadsMismatch(
            "the heads are for {} layers, {} numbers wide, and {} tokens, ".format(*found)
            + "the model has {}, {} and {}. ".format(*expected)
            + "Fit heads to this model: selfspec fit"
        )
    own = next(heads.parameters(), weight)
    if own.device != weight.device:
        raise HeadsMismatch(
            f"the heads are on {own.device}, the model's lm_head is on {weight.device}. Move them: "
            "heads.to(device)"
        )


def _weights(model: nn.Module) -> Iterator[tuple[nn.Module, Tensor]]:
    """Each weight with the module that has it."""
    return ((part, weight) for part in model.modules() for weight in part.parameters(recurse=False))


def _offloaded(part: nn.Module) -> bool:
    """Whether accelerate brings the weights when the module is called."""
    return hasattr(part, "_hf_hook")


def _kind(value: Any) -> str:
    name = type(value).__name__
    return f"a class, {value.__name__}" if isinstance(value, type) else f"of type {name}"
