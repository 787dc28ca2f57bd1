"""Whether an executor knows all that takes part in a layer's forward.

Comes in: a decoder and its lm_head. Goes out: nothing, or a ValueError that names what is not
known; then the generic executor runs the model. Looked at are modules and their classes, weights
and buffers, hooks, and every word of the forwards' source. Whether the numbers agree, near and far,
is for the agreement check. Called by the executors when they are made.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from selfspec.model.executors.masks import FULL, SLIDING, attention_types
from selfspec.model.executors.source import words
from selfspec.model.parts import DecoderParts
from selfspec.model.products import why_unusual

_ACTIVATIONS = ("torch.nn.modules.activation", "transformers.activations")
"""Where activations are defined that treat each number by itself."""


def _set(text: str) -> frozenset[str]:
    return frozenset(text.split())


_TORCH = "torch nn F .functional .float32 .dtype .to .shape .view .reshape .transpose .contiguous"

_LAYER_WORDS = _set(
    "self.self_attn self.attention self.mlp self.input_layernorm self.post_attention_layernorm "
    "self.pre_feedforward_layernorm self.post_feedforward_layernorm self.post_self_attn_layernorm "
    "self.post_mlp_layernorm self.post_norm1 self.post_norm2 self.use_parallel_residual "
    "self.residual_multiplier hidden_states= attention_mask= position_ids= past_key_values= "
    "layer_past= use_cache= position_embeddings= "
    "self.dropout self.resid_dropout self.resid_attn_dropout self.resid_mlp_dropout "  # off, all
    "self.post_attention_dropout self.post_mlp_dropout"
)
_NORM_WORDS = _set(
    f"{_TORCH} self.weight self.bias self.eps self.variance_epsilon self.normalized_shape "
    "self._norm .pow .mean .rsqrt .float .type_as .layer_norm keepdim= dtype= eps= "
    "maybe_autocast _cast_if_autocast_enabled device_type= enabled= .device .type .amp "
    ".autocast_mode ._cast .get_autocast_dtype .is_autocast_enabled"
)
_MLP_WORDS = _set(
    f"{_TORCH} self.gate_proj self.up_proj self.down_proj self.gate_up_proj self.c_fc self.c_proj "
    "self.fc1 self.fc2 self.dense_h_to_4h self.dense_4h_to_h "
    "self.act_fn self.activation_fn self.act .chunk dim= "
    "self.gate self.experts "
    "self.residual_dropout self.training .dropout p= training= "  # dropout is off in evaluation
    "self.jitter_noise .empty_like .uniform_"  # as are these
)
_ROUTER_WORDS = _set(
    f"{_TORCH} .nn self.weight self.top_k self.norm_topk_prob self.hidden_dim .linear .softmax "
    ".float .topk .sum dtype= keepdim= dim="
)
_EXPERTS_WORDS = _set(
    f"{_TORCH} .nn self.gate_up_proj self.down_proj self.act_fn self.num_experts .linear .chunk "
    "dim= .zeros_like .one_hot num_classes= .permute .greater .sum .nonzero .no_grad .where "
    ".index_add_"
)
_ATTENTION_WORDS = _set(
    f"{_TORCH} .cat .expand .matmul .softmax .unsqueeze .dropout .float .flatten .stack .chunk "
    ".split .repeat_interleave .size .tanh dim= dtype= p= training= "
    "self.config self.training self.layer_idx "
    "self.q_proj self.k_proj self.v_proj self.qkv_proj self.query_key_value self.o_proj self.dense "
    "self.q_norm self.k_norm self.q_layernorm self.k_layernorm self.query_layernorm "
    "self.key_layernorm self.use_qk_norm self.qk_layernorm self.head_dim self.head_size "
    "self.num_heads self.num_key_value_heads self.num_key_value_groups config.num_attention_heads "
    "self.scaling self.attn_logit_softcapping softcap= self.rotary_ndims self.use_rope "
    "config.clip_qkv .clamp_ min= max= "  # refused where it is set
    "self.is_sliding self.attention_dropout self.residual_dropout dropout= scaling= "  # off, too
    "ALL_ATTENTION_FUNCTIONS .get_interface config._attn_implementation eager_attention_forward "
    "repeat_kv apply_rotary_pos_emb rotate_half use_kernel_forward_from_hub 'rotary_pos_emb' "
    # windows are in the masks; only flash attention, which is not known, reads these
    "self.sliding_window config.sliding_window sliding_window= 'sliding_window' position_ids= "
    ".update"
)
_WORDS = {
    "": _LAYER_WORDS,
    "mlp": _MLP_WORDS,
    "mlp.gate": _ROUTER_WORDS,
    "mlp.experts": _EXPERTS_WORDS,
    **dict.fromkeys(("self_attn", "attention"), _ATTENTION_WORDS),
}
"""By name of the part; "": the layer."""
_WEIGHTS = {"mlp.gate": {"weight"}, "mlp.experts": {"gate_up_proj", "down_proj"}}
"""Of parts that are no linear layers."""
_DEVICE_WORDS = _set(".item .tolist .cpu .numpy .nonzero .any .all .get_seq_length .synchronize")
"""What reads back from a device, or steers Python by it: a captured graph would not do it again."""

_IDLE = ("transformers.utils.output_capturing", "selfspec.model.hooks")
"""Where hooks come from that change nothing."""

_INITIAL = ("__init__", "__init_subclass__", "extra_repr", "reset_parameters")


def require_known(decoder: DecoderParts, lm_head: Any) -> None:
    """Raise ValueError unless every word of these layers' forwards is one that a recipe explains.

    And unless their linear layers are plain ones, of one dtype, with nothing around them.
    """
    require_own_attention(decoder.config)
    _require_usual(decoder)
    _need(type(lm_head) is nn.Linear, f"lm_head is no plain linear layer, but {_kind(lm_head)}")
    _need_plain("lm_head", lm_head)
    reason = why_unusual(lm_head.weight)
    _need(reason is None, f"lm_head: {reason}")
    require_no_global_hooks()
    for index, layer in enumerate(decoder.layers):
        try:
            _require_layer(layer, lm_head.weight)
        except ValueError as error:
            raise ValueError(f"layer {index + 1}: {error}") from None


def require_own_attention(config: Any) -> None:
    """Raise ValueError unless attention is causal, and transformers' own sdpa or eager."""
    name = config._attn_implementation
    _need(name in ("sdpa", "eager"), f"attention is {name}, expected sdpa or eager")
    own = ALL_ATTENTION_FUNCTIONS.get("sdpa")
    _need(
        name == "eager" or getattr(own, "__module__", "").startswith("transformers."),
        "another sdpa attention is registered",
    )
    _need(getattr(config, "is_causal", True) is not False, "attention is not causal")


def require_capturable(decoder: Any, lm_head: nn.Module) -> None:
    """Raise ValueError unless the modules' own code is all that runs, and leaves no trace.

    A graph repeats what happens on the device: not what Python does, keeps or decides.
    """
    require_own_attention(decoder.config)
    _require_usual(decoder)
    require_no_global_hooks()
    for name, part in [*decoder.module.named_modules(), ("lm_head", lm_head)]:
        _need_plain(name or "the decoder", part)
    classes = {type(part) for layer in decoder.layers for part in layer.modules()}
    for kind in sorted(classes, key=lambda kind: kind.__name__):
        if kind.__module__.split(".")[0] == "torch":
            continue
        for function in vars(kind).values():
            if inspect.isfunction(function) and function.__name__ not in _INITIAL:
                found = words(function)
                traces = {word for word in found if word.startswith(("global ", "self."))}
                traces = {word for word in traces if word[-2:] == ":=" or word[0] == "g"}
                _need(not traces, f"{kind.__name__} keeps {', '.join(sorted(traces))}")
                read = found & _DEVICE_WORDS
                _need(not read, f"{kind.__name__} reads values back ({', '.join(sorted(read))})")


def hooked(part: nn.Module) -> bool:
    """Whether calling this module does more than its forward.

    Not counted: what transformers leaves behind after a call with output_hidden_states, which is
    idle in later calls.
    """
    return bool(foreign_hooks(part)) or hasattr(part, "_hf_hook")


def foreign_hooks(part: nn.Module) -> list[Any]:
    """Hooks around the module's forward, without those that are idle or only look on for us."""
    hooks = [*part._forward_hooks.values(), *part._forward_pre_hooks.values()]
    return [hook for hook in hooks if getattr(hook, "__module__", None) not in _IDLE]


def require_no_global_hooks() -> None:
    """Raise ValueError if torch calls something around the forward of every module."""
    found = [*torch_module._global_forward_hooks, *torch_module._global_forward_pre_hooks]
    _need(not found, "hooks are set for all modules")


def _require_usual(decoder: Any) -> None:
    """Raise ValueError for positions or masks of another kind than executors compute."""
    others = set(attention_types(decoder.config)) - {FULL, SLIDING}
    _need(not others, f"layers have {', '.join(sorted(others))}")
    _need(decoder.rotary_emb is not None, "positions are not rotated")
    clip = getattr(decoder.config, "clip_qkv", None)
    _need(clip is None, f"queries, keys and values are clipped to {clip}")


def _require_layer(layer: nn.Module, like: Tensor) -> None:
    """Raise ValueError unless one layer's parts are known, with weights of the dtype of `like`."""
    for name, part in layer.named_modules():
        _need_plain(name or "it", part)
        allowed: set[str] = set()
        if type(part) is nn.Linear:
            allowed = {"weight", "bias"}
        elif "norm" in name:
            _need_words(part, _NORM_WORDS)
            allowed = {"weight", "bias"}
        elif name.startswith("mlp.") and "act" in name and type(part).__module__ in _ACTIVATIONS:
            pass
        elif name in _WORDS:
            _need_words(part, _WORDS[name])
            allowed = _WEIGHTS.get(name, set())
        else:
            idle = isinstance(part, nn.Dropout | nn.Identity)
            _need(idle, f"{name} is {_kind(part)}")
        if type(part) is nn.Linear or name in _WEIGHTS:
            for weight in part.parameters(recurse=False):
                reason = why_unusual(weight)
                _need(reason is None, f"{name}: {reason}")
                _need(weight.dtype == like.dtype, f"{name} is {weight.dtype}")
        own = {key for key, _ in [*part.named_parameters(recurse=False), *_buffers(part)]}
        _need(own <= allowed, f"{name or 'it'} has {', '.join(sorted(own - allowed))}")


def _need_words(part: nn.Module, known: frozenset[str]) -> None:
    """The forward of the module's class must be of `known` words only."""
    unknown = words(type(part).forward) - known
    _need(not unknown, f"{type(part).__name__} uses {', '.join(sorted(unknown))}")


def _need_plain(name: str, part: nn.Module) -> None:
    """Calling the module must be calling its class's forward."""
    _need(not hooked(part), f"{name} has hooks")
    _need("forward" not in vars(part), f"the forward of {name} was replaced")
    _need(getattr(part, "_compiled_call_impl", None) is None, f"{name} is compiled")
    caller = type(part).__call__
    home = getattr(caller, "__globals__", {}).get("__name__", "")
    known = ("torch.nn.modules.module", "transformers.modeling_layers")
    _need(home in known, f"calling {name} is not calling a module")


def _kind(part: nn.Module) -> str:
    return f"{type(part).__module__}.{type(part).__name__}"


def _buffers(part: nn.Module) -> list[tuple[str, Tensor]]:
    return list(part.named_buffers(recurse=False))


def _need(condition: bool, otherwise: str) -> None:
    if not condition:
        raise ValueError(otherwise)
