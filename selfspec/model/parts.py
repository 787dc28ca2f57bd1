"""The parts of a decoder under the same names for all families, and the hooks around them.

A missing or unknown part raises UnsupportedModel with its name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from selfspec.errors import InvalidOption, UnsupportedModel


class Unembedding(NamedTuple):
    """A model's own path from a hidden state to logits; its tensors are shared, never copied."""

    weight: Tensor  # [V, d]
    norm: nn.Module  # the final norm
    finish: Callable[[Tensor], Tensor]  # steps after the linear layer (soft-capping); to float32
    bias: Tensor | None = None  # [V], if lm_head has one


_EMBEDDINGS = ("embed_tokens", "embed_in", "wte", "word_embeddings")
_LAYERS = ("layers", "h", "blocks")
_NORMS = ("norm", "final_layer_norm", "final_layernorm", "ln_f", "layer_norm", "norm_f")
_LEARNED = ("wpe", "embed_positions")
"""The names that families use for each part, in search order."""

CACHES = ("cache", "past_key_values", "layer_past")  # keywords under which layers take a KV cache
CACHE = next(word for word in CACHES if word in inspect.signature(create_causal_mask).parameters)
"""The keyword that models and masks use in the installed transformers: `cache` from 5.24 on."""

SHARED = "shared_kv_states"
"""Where layers leave keys and values for later layers (Gemma 4); such models are refused."""

_GIVEN = {"attention_mask", "position_ids", "use_cache", "position_embeddings"}
"""The arguments that a layer is given beside the hidden states and its KV cache."""

_IDLE = {
    "output_attentions",
    *("encoder_hidden_states", "encoder_attention_mask"),  # a decoder without encoder has none
    *("per_layer_input", SHARED),  # their modules and config are refused if in use
}
"""Arguments that layers accept but do not need."""

_NORMS_EMBEDDINGS = {"nanochat"}  # families whose final norm is also applied to the embeddings
_DIVIDES_BEFORE_HEAD = {"minicpm3"}  # by `logits_scaling`; other families do so after lm_head
_MULTIPLIES = {"hyperclovax"}  # by `logits_scaling`, where others divide

MOVING_ROPE = {"dynamic": "max_position_embeddings", "longrope": "original_max_position_embeddings"}
"""RoPE whose frequencies change in passes with positions past the value of this config field."""

FULL = "full_attention"
SLIDING = "sliding_attention"
CHUNKED = "chunked_attention"  # in all three, layers keep one key and value per position


def unsupported(model: PreTrainedModel, why: str) -> UnsupportedModel:
    return UnsupportedModel(f"{type(model).__name__} {why}. Use transformers' own generate for it")


@dataclass(frozen=True, kw_only=True)
class DecoderParts:
    """A decoder's modules, the model's own, under the names that most families use."""

    module: nn.Module  # the decoder that holds them
    config: PreTrainedConfig
    embed_tokens: nn.Module
    layers: nn.ModuleList
    norm: nn.Module  # from the output of layer L to the input of lm_head
    rotary_emb: nn.Module | None  # gives layers rotations by position; None: they need none
    learned_positions: Callable[[Tensor], Tensor] | None  # embeds positions, added before layer 1
    embedding_multiplier: float | None  # Granite's, AFMoE's
    norms_embeddings: bool
    logits_divisor: float | None  # logits after lm_head are divided by it (Granite),
    logits_factor: float | None  # multiplied by it (Cohere, HyperCLOVA X),
    logits_cap: float | None  # and soft-capped at it (Gemma)
    cache_keyword: str  # the keyword under which layers take the KV cache
    shares: bool  # whether layers also take SHARED: from transformers 5.24 on some write to it

    def embed(self, ids: Tensor) -> Tensor:
        """[B, T] ids -> [B, T, d] hidden states at boundary 0, without learned positions."""
        hidden: Tensor = self.embed_tokens(ids)
        if self.embedding_multiplier is not None:
            hidden = hidden * self.embedding_multiplier
        return self.norm(hidden) if self.norms_embeddings else hidden

    @cached_property
    def rotates_by_kind(self) -> bool:
        """Whether rotations differ by attention type, as in Gemma 3."""
        module = self.rotary_emb
        return module is not None and "layer_type" in inspect.signature(module.forward).parameters

    def rotations(self, hidden: Tensor, positions: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        """The rotations for layers of a kind at `positions` [B, T]; needs a `rotary_emb`."""
        by_kind = (kind,) if self.rotates_by_kind else ()
        return self.rotary_emb(hidden, positions, *by_kind)  # type: ignore[misc, no-any-return]  # callers check that it exists

    @cached_property
    def rotations_end(self) -> int | None:
        """The number of positions past which all rotations change (dynamic NTK, longrope)."""
        rope = getattr(self.config, "rope_parameters", None) or {}
        limits = [
            int(part.get(MOVING_ROPE[part["rope_type"]]) or self.config.max_position_embeddings)
            for part in (rope, *rope.values())
            if isinstance(part, dict) and part.get("rope_type") in MOVING_ROPE
        ]
        return min(limits, default=None)

    @property
    def position_limit(self) -> int | None:
        """The number of positions, if rotations or tables (as in GPT-J) limit it."""
        if self.rotary_emb is None or hasattr(self.rotary_emb, "embed_positions"):
            return int(self.config.max_position_embeddings)
        return self.rotations_end


class _DividedNorm(nn.Module):
    """A final norm, [.., d] -> [.., d], whose output is divided by a number."""

    def __init__(self, norm: nn.Module, divisor: float) -> None:
        super().__init__()
        self.norm, self.divisor = norm, divisor

    def forward(self, hidden: Tensor) -> Tensor:
        normed: Tensor = self.norm(hidden)
        return normed / self.divisor


def text_config(model: PreTrainedModel) -> Any:
    """The decoder's own config; typed Any because its fields differ by family."""
    return model.config.get_text_config(decoder=True)


def attention_types(config: PreTrainedConfig) -> list[str]:
    """Attention type of each layer; if the config has no list, one for all by `sliding_window`."""
    if (types := getattr(config, "layer_types", None)) is not None:
        return list(types)
    kind = FULL if getattr(config, "sliding_window", None) is None else SLIDING
    return [kind] * config.num_hidden_layers


def parts_of(model: PreTrainedModel) -> DecoderParts:
    """The parts of a model's decoder. Raises UnsupportedModel for a missing or unknown part."""
    config = text_config(model)
    if model.config.is_encoder_decoder:
        raise unsupported(model, "has an encoder, expected a decoder without one")
    if not hasattr(head := model.get_output_embeddings(), "weight"):
        kind = "no" if head is None else f"{type(head).__name__} as"
        raise unsupported(model, f"has {kind} lm_head, expected a linear layer")
    decoder, layers = _decoder(model)
    if len(layers) < (count := config.num_hidden_layers):  # LongCat: two KV caches per layer
        raise unsupported(model, f"has {len(layers)} layers, expected the {count} of its config")
    _hidden, *others = inspect.signature(layers[0].forward).parameters.values()
    parameters = {entry.name for entry in others if entry.kind is not entry.VAR_KEYWORD}
    if unknown := parameters - _GIVEN - _IDLE - {*CACHES}:
        raise unsupported(model, f"has layers that take {sorted(unknown)[0]}")
    keyword = next((word for word in CACHES if word in parameters), None)
    if keyword is None:
        raise unsupported(model, "has layers that take no keys and values")
    embedding, norm, learned, rotary = (
        _part(decoder, names) for names in (_EMBEDDINGS, _NORMS, _LEARNED, ("rotary_emb",))
    )
    if norm is None or embedding is None:
        kind, names = ("final norm", _NORMS) if norm is None else ("embedding", _EMBEDDINGS)
        raise unsupported(model, f"has no {kind} named {', '.join(names)}")
    for child, module in decoder.named_children():  # its forward may use it
        known = module in (embedding, layers, norm, rotary, learned)
        if not known and not isinstance(module, nn.Dropout):
            raise unsupported(model, f"has a decoder with {child}, a part that is not known")
    used = nn.ModuleList([embedding, layers, norm, head])
    hooked = (part for part in model.modules() if hasattr(part, "_hf_hook"))
    loaded = {id(weight) for part in hooked for weight in part.parameters()}  # when it is called
    if any(weight.is_meta and id(weight) not in loaded for weight in used.parameters()):
        raise InvalidOption(
            f"{type(model).__name__} has weights on the meta device, expected them in memory. Load "
            "it with from_pretrained, or with selfspec.load(...)"
        )
    scaling: Any = getattr(config, "logits_scaling", None)
    before_head = config.model_type in _DIVIDES_BEFORE_HEAD
    multiplies = config.model_type in _MULTIPLIES
    by_width = config.hidden_size**0.5 if getattr(config, "mup_enabled", False) else None
    return DecoderParts(
        module=decoder,
        config=config,
        embed_tokens=embedding,
        layers=layers,
        norm=_DividedNorm(norm, scaling) if before_head else norm,
        rotary_emb=rotary,
        learned_positions=None if learned is None else _by_position(learned),
        embedding_multiplier=getattr(config, "embedding_multiplier", by_width),
        norms_embeddings=config.model_type in _NORMS_EMBEDDINGS,
        logits_divisor=None if before_head or multiplies else scaling,
        logits_factor=scaling if multiplies else getattr(config, "logit_scale", None),
        logits_cap=getattr(config, "final_logit_softcapping", None),
        cache_keyword=keyword,
        shares=SHARED in parameters,
    )


def _decoder(model: PreTrainedModel) -> tuple[nn.Module, nn.ModuleList]:
    """The module that holds the layers: `model.get_decoder()`, or a module inside it."""
    decoder: Any = model.get_decoder()
    module: Any
    for module in (decoder, getattr(decoder, "model", None), getattr(decoder, "decoder", None)):
        if isinstance(layers := _part(module, _LAYERS), nn.ModuleList):
            return module, layers
    raise unsupported(model, f"has no list of layers named {', '.join(_LAYERS)} to cut open")


def _part(decoder: Any, names: tuple[str, ...]) -> nn.Module | None:
    candidates = (getattr(decoder, name, None) for name in names)
    return next((part for part in candidates if isinstance(part, nn.Module)), None)


def _by_position(learned: nn.Module) -> Callable[[Tensor], Tensor]:
    """Position embeddings as a function of positions only: OPT's also take a mask, first."""
    first, *others = inspect.signature(learned.forward).parameters
    if first != "position_ids" and "position_ids" in others:
        return lambda positions: learned(None, position_ids=positions)
    return learned


# --- checks of a caller's model


GENERATING = {"prepare_inputs_for_generation": "prepares inputs", "_sample": "chooses tokens"}
"""Methods that `generate` calls and we replace, and what they do."""


def check_model(model: Any, name: str = "model") -> None:
    """Raise InvalidOption unless `model` is a causal language model."""
    config = getattr(model, "config", None)
    methods = (getattr(model, method, None) for method in ("generate", *GENERATING))
    is_model = isinstance(model, nn.Module) and all(map(callable, methods))
    if not is_model or not hasattr(config, "get_text_config"):
        raise InvalidOption(
            f"{name} is {kind_of(model)}, expected a causal language model of transformers. Load "
            "one by name with selfspec.load(...), or with AutoModelForCausalLM"
        )


def kind_of(value: Any) -> str:
    name = type(value).__name__
    return f"a class, {value.__name__}" if isinstance(value, type) else f"of type {name}"


# --- hooks, and third-party code

_IDLE_HOOKS = ("transformers.utils.output_capturing", "selfspec.model.check")
"""Modules whose hooks change nothing: transformers leaves some behind after a call with
output_hidden_states."""

_OWN = ("torch.", "transformers.", "selfspec.")  # code that an executor may replace if they agree


def foreign_hooks(fields: Mapping[str, Any]) -> list[Any]:
    """The hooks in a module's attributes, without idle ones."""
    hooks = [*fields["_forward_hooks"].values(), *fields["_forward_pre_hooks"].values()]
    return [hook for hook in hooks if getattr(hook, "__module__", None) not in _IDLE_HOOKS]


def require_own_code(decoder: DecoderParts, lm_head: nn.Module) -> None:
    """Raise ValueError unless layers, norm and lm_head run the code of torch and transformers.

    Another executor's outputs are compared on a few inputs, which does not reveal a branch on
    values, a count of calls, an observer, or a bound that few values reach. Released model code has
    none of these beyond what its config says.
    """
    config: Any = decoder.config
    attention = config._attn_implementation
    _require(attention in ("sdpa", "eager"), f"attention is {attention}, expected sdpa or eager")
    built_in = getattr(ALL_ATTENTION_FUNCTIONS.get("sdpa"), "__module__", "").startswith(_OWN)
    _require(attention == "eager" or built_in, "another sdpa attention is registered")
    _require(getattr(config, "is_causal", True) is not False, "attention is not causal")
    others = set(attention_types(config)) - {FULL, SLIDING}
    _require(not others, f"layers have {', '.join(sorted(others))}")
    _require(decoder.rotary_emb is not None, "positions are not rotated")
    clip = getattr(config, "clip_qkv", None)
    _require(clip is None, f"queries, keys and values are clipped to {clip}")
    hooks = [*torch_module._global_forward_hooks, *torch_module._global_forward_pre_hooks]
    _require(not hooks, "hooks are set for all modules")
    ends = ("lm_head", lm_head), ("norm", decoder.norm)
    for name, part in (*decoder.layers.named_modules(prefix="layers"), *ends):
        _require_own_call(name, part)


def _require_own_call(name: str, part: nn.Module) -> None:
    """Raise ValueError unless a call of the module is a call of its class's forward, in _OWN."""
    kind = type(part)
    _require(not foreign_hooks(vars(part)) and not hasattr(part, "_hf_hook"), f"{name} has hooks")
    _require("forward" not in vars(part), f"the forward of {name} was replaced")
    functions: list[Any] = [kind.__call__, kind.forward]
    for function in functions:
        home = getattr(function, "__globals__", {}).get("__name__", "")
        _require(
            home.startswith(_OWN), f"{name} ({kind.__name__}) runs code of {home or 'no module'}"
        )
        if hasattr(function, "__wrapped__"):
            functions.append(function.__wrapped__)


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise ValueError(reason)
