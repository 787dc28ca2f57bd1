"""The parts of a decoder, under one name each, whatever its family calls them.

Comes in: a PreTrainedModel. Goes out: a DecoderParts, or UnsupportedModel with the part that is
missing or unknown. Called by the backbone; read by everything that runs a decoder's modules.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from selfspec.errors import UnsupportedModel

_EMBEDDINGS = ("embed_tokens", "embed_in", "wte", "word_embeddings")
_LAYERS = ("layers", "h", "blocks")
_NORMS = ("norm", "final_layer_norm", "final_layernorm", "ln_f", "layer_norm", "norm_f")
_ROTARY = ("rotary_emb",)
_LEARNED = ("wpe", "embed_positions")
"""What families call each part, in the order in which it is looked for."""

_CACHES = ("past_key_values", "layer_past")
"""Keywords under which a layer takes keys and values."""

_GIVEN = {"attention_mask", "position_ids", "use_cache", "position_embeddings"}
"""What a layer is given beside its cache and, first of all, the hidden states."""

_IDLE = {
    "output_attentions",
    *("encoder_hidden_states", "encoder_attention_mask"),  # a decoder alone has none
    *("per_layer_input", "shared_kv_states"),  # their modules and config are refused if in use
}
"""What layers may be given and then compute the same without."""

_NORMS_EMBEDDINGS = {"nanochat"}
"""Families whose final norm is also applied to the embeddings."""

_DIVIDES_BEFORE_HEAD = {"minicpm3"}
"""Families that divide by `logits_scaling` before lm_head; others do so behind it."""

FULL = "full_attention"
SLIDING = "sliding_attention"
CHUNKED = "chunked_attention"
"""Attention types whose layers keep one key and value per position."""

_INSTEAD = "Use transformers' own generate for it"


@dataclass(frozen=True, kw_only=True)
class DecoderParts:
    """A decoder's modules, the model's own, under the names that most families use."""

    module: nn.Module
    """The decoder that holds them."""
    config: PreTrainedConfig
    embed_tokens: nn.Module
    layers: nn.ModuleList
    norm: nn.Module
    """From the output of layer L to what lm_head reads."""
    rotary_emb: nn.Module | None
    """From positions to the rotations that each layer gets; None: a layer needs none."""
    learned_positions: Callable[[Tensor], Tensor] | None
    """From positions to embeddings that are added where layers begin."""
    norms_embeddings: bool
    logits_divisor: float | None
    """Logits are divided by it behind lm_head."""
    cache_keyword: str
    """The keyword under which layers take keys and values."""

    def embed(self, ids: Tensor) -> Tensor:
        """[B, T] ids -> [B, T, d] hidden states at boundary 0, without learned positions."""
        hidden: Tensor = self.embed_tokens(ids)
        if (scale := getattr(self.config, "embedding_multiplier", None)) is not None:  # Granite
            hidden = hidden * scale
        return self.norm(hidden) if self.norms_embeddings else hidden

    @property
    def rotates_by_kind(self) -> bool:
        """Whether layers of each attention type have rotations of their own, as Gemma 3's have."""
        taken = (
            {} if self.rotary_emb is None else inspect.signature(self.rotary_emb.forward).parameters
        )
        return "layer_type" in taken

    def rotations(self, hidden: Tensor, positions: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        """Of layers with attention of `kind`, whose module there is: for `positions` [B, T]."""
        by_kind = (kind,) if self.rotates_by_kind else ()
        return self.rotary_emb(hidden, positions, *by_kind)  # type: ignore[misc, no-any-return]  # callers know that it is there

    def with_positions(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """[B, T, d] from boundary 0 at `positions` [B, T] -> what layer 1 reads, [B, T, d]."""
        if self.learned_positions is None:
            return hidden
        return hidden + self.learned_positions(positions).to(hidden.device)


class DividedNorm(nn.Module):
    """A final norm, [.., d] -> [.., d], whose output is divided by a number."""

    def __init__(self, norm: nn.Module, divisor: float) -> None:
        super().__init__()
        self.norm = norm
        self.divisor = divisor

    def forward(self, hidden: Tensor) -> Tensor:
        """[.., d] -> [.., d]."""
        normed: Tensor = self.norm(hidden)
        return normed / self.divisor


def text_config(model: PreTrainedModel) -> Any:
    """The decoder's own config; typed Any because its fields differ by family."""
    return model.config.get_text_config(decoder=True)


def attention_types(config: PreTrainedConfig) -> list[str]:
    """Attention type of each layer; one for all, by `sliding_window`, if the config names none."""
    types = getattr(config, "layer_types", None)
    if types is not None:
        return list(types)
    one = FULL if getattr(config, "sliding_window", None) is None else SLIDING
    return [one] * config.num_hidden_layers


def parts_of(model: PreTrainedModel) -> DecoderParts:
    """The parts of a model's decoder.

    Raises UnsupportedModel, by name, for a part that is missing and for one that is not known.
    """
    name, config = type(model).__name__, text_config(model)
    if model.config.is_encoder_decoder:
        raise UnsupportedModel(f"{name} has an encoder, expected a decoder alone. {_INSTEAD}")
    if model.get_output_embeddings() is None:
        raise UnsupportedModel(f"{name} has no lm_head to read tokens from. {_INSTEAD}")
    decoder, layers = _decoder(model, name)
    if len(layers) < config.num_hidden_layers:  # LongCat: two sets of keys and values per layer
        raise UnsupportedModel(
            f"{name} has {len(layers)} layers, expected the {config.num_hidden_layers} of its "
            f"config. {_INSTEAD}"
        )
    keyword = _cache_keyword(layers[0], name)
    norm = _need(decoder, _NORMS, "final norm", name)
    learned = _part(decoder, _LEARNED)
    divisor: Any = getattr(config, "logits_scaling", None)
    before_head = config.model_type in _DIVIDES_BEFORE_HEAD
    parts = DecoderParts(
        module=decoder,
        config=config,
        embed_tokens=_need(decoder, _EMBEDDINGS, "embedding", name),
        layers=layers,
        norm=DividedNorm(norm, divisor) if before_head else norm,
        rotary_emb=_part(decoder, _ROTARY),
        learned_positions=None if learned is None else _by_position(learned),
        norms_embeddings=config.model_type in _NORMS_EMBEDDINGS,
        logits_divisor=None if before_head else divisor,
        cache_keyword=keyword,
    )
    _refuse_unknown(decoder, {parts.embed_tokens, layers, norm, parts.rotary_emb, learned}, name)
    return parts


def _decoder(model: PreTrainedModel, name: str) -> tuple[nn.Module, nn.ModuleList]:
    """The module that holds the layers: transformers' own idea of it, or what that holds."""
    named: Any = model.get_decoder()
    found: Any
    for found in (named, getattr(named, "model", None), getattr(named, "decoder", None)):
        if isinstance(layers := _part(found, _LAYERS), nn.ModuleList):
            return found, layers
    raise UnsupportedModel(
        f"{name} has no list of layers named {', '.join(_LAYERS)} to cut open. {_INSTEAD}"
    )


def _part(decoder: Any, names: tuple[str, ...]) -> nn.Module | None:
    """The first of the decoder's modules that has one of these names."""
    found = (getattr(decoder, name, None) for name in names)
    return next((part for part in found if isinstance(part, nn.Module)), None)


def _need(decoder: nn.Module, names: tuple[str, ...], what: str, model: str) -> nn.Module:
    if (found := _part(decoder, names)) is None:
        raise UnsupportedModel(f"{model} has no {what} named {', '.join(names)}. {_INSTEAD}")
    return found


def _cache_keyword(layer: nn.Module, name: str) -> str:
    """How a layer takes keys and values. Refuses layers that take what is never given here."""
    _hidden, *others = inspect.signature(layer.forward).parameters.values()
    taken = {entry.name for entry in others if entry.kind is not entry.VAR_KEYWORD}
    keyword = next((word for word in _CACHES if word in taken), None)
    if unknown := taken - _GIVEN - _IDLE - {*_CACHES}:
        raise UnsupportedModel(f"{name} has layers that take {sorted(unknown)[0]}. {_INSTEAD}")
    if keyword is None:
        raise UnsupportedModel(f"{name} has layers that take no keys and values. {_INSTEAD}")
    return keyword


def _by_position(learned: nn.Module) -> Callable[[Tensor], Tensor]:
    """Position embeddings as a function of positions alone: OPT asks for a mask before them."""
    first, *others = inspect.signature(learned.forward).parameters
    if first != "position_ids" and "position_ids" in others:
        return lambda positions: learned(None, position_ids=positions)
    return learned


def _refuse_unknown(decoder: nn.Module, known: Container[nn.Module | None], name: str) -> None:
    """Raise UnsupportedModel for a module beside the parts: its forward may use it."""
    for child, module in decoder.named_children():
        if module not in known and not isinstance(module, nn.Dropout):
            raise UnsupportedModel(
                f"{name} has a decoder with {child}, a part that is not known. {_INSTEAD}"
            )
