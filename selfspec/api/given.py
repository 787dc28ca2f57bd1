"""Whether `wrap` and `load` were given the kinds of things they take.

Comes in: what a caller gave. Goes out: nothing, or InvalidOption or HeadsMismatch, in one line
that says what was found, what was expected and what to do.
"""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from selfspec.errors import HeadsMismatch, InvalidOption
from selfspec.heads.exit_heads import ExitHeads
from selfspec.model.given import check_model, kind_of
from selfspec.model.unembedding import Unembedding

LOADING = ("heads", "dtype", "device", "attn_implementation", "executor", "draft_model")
"""Keywords of `load` that are no options."""

WRAPPING = ("tokenizer", "heads", "label", "executor", "draft_model")
"""Keywords of `wrap` that are none."""


def check_loading(
    model: object, draft_model: object, heads: object, attention: object, device: object
) -> None:
    """Raise InvalidOption for what `load` cannot take as these."""
    for value, name in ((model, "model"), (draft_model, "draft_model")):
        if value is not None and not (isinstance(value, str | Path) and str(value)):
            found = "empty" if value == "" else kind_of(value)
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
            f"tokenizer is {kind_of(tokenizer)}, expected a tokenizer of transformers. {advice}"
        )
    _check_heads(heads)
    if draft_model is not None:
        check_model(draft_model, "draft_model")


def _check_heads(heads: object) -> None:
    """Raise InvalidOption unless it is None, a name, a folder or ExitHeads."""
    if heads is not None and not isinstance(heads, str | Path | ExitHeads):
        raise InvalidOption(
            f"heads are {kind_of(heads)}, expected a folder, a name, 'logit-lens' or ExitHeads. "
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
