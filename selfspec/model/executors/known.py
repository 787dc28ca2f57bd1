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
from selfspec.model.products import why_unusual

_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}

_ACTIVATIONS = ("torch.nn.modules.activation", "transformers.activations")
"""Where activations are defined that treat each number by itself."""


def _set(text: str) -> frozenset[str]:
    return frozenset(text.split())


_TORCH = "torch nn F .functional .float32 .dtype .to .shape .view .reshape .transpose .contiguous"

_LAYER_WORDS = _set(
    "self.input_layernorm self.self_attn self.post_attention_layernorm self.mlp hidden_states= "
    "attention_mask= position_ids= past_key_values= use_cache= position_embeddings="
)
_NORM_WORDS = _set(f"{_TORCH} self.weight self.variance_epsilon .pow .mean .rsqrt keepdim= .float")
_MLP_WORDS = _set(
    f"{_TORCH} self.gate_proj self.up_proj self.down_proj self.act_fn "
    "self.residual_dropout self.training .dropout p= training="  # dropout is off in evaluation
)
_ATTENTION_WORDS = _set(
    f"{_TORCH} .cat .expand .matmul .softmax .unsqueeze .dropout dim= dtype= p= training= "
    "self.q_proj self.k_proj self.v_proj self.o_proj self.q_norm self.k_norm self.head_dim "
    "self.num_key_value_groups self.scaling self.layer_idx self.config self.training "
    "self.attention_dropout self.residual_dropout dropout= scaling= "  # off, too
    "ALL_ATTENTION_FUNCTIONS .get_interface config._attn_implementation eager_attention_forward "
    "repeat_kv apply_rotary_pos_emb rotate_half use_kernel_forward_from_hub 'rotary_pos_emb' "
    # windows are in the masks; only flash attention, which is not known, reads these
    "self.sliding_window config.sliding_window sliding_window= 'sliding_window' position_ids= "
    ".update"
)
_DEVICE_WORDS = _set(".item .tolist .cpu .numpy .nonzero .any .all .get_seq_length .synchronize")
"""What reads back from a device, or steers Python by it: a captured graph would not do it again."""

_IDLE = ("transformers.utils.output_capturing", "selfspec.model.hooks")
"""Where hooks come from that change nothing."""

_INITIAL = ("__init__", "__init_subclass__", "extra_repr", "reset_parameters")


def require_llama_like(decoder: Any, lm_head: Any) -> None:
    """Raise ValueError unless these layers are nothing but what packed weights compute.

    That is: RMSNorm, rotated queries and keys (normed or not), softmax attention over full or
    sliding windows, and a gated MLP, each added to what came in.
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
    attentions = [layer.self_attn for layer in decoder.layers]
    for name in ("head_dim", "scaling"):
        values = {float(getattr(attention, name)) for attention in attentions}
        _need(len(values) == 1, f"layers differ in {name}: {sorted(values)}")


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


def _require_layer(layer: Any, like: Tensor) -> None:
    """Raise ValueError unless one layer is Llama's, with weights of the dtype of `like`."""
    _need_children("it", layer, _LAYER)
    _need_words(layer, _LAYER_WORDS)
    attention, mlp = layer.self_attn, layer.mlp
    _need_children("attention", attention, _ATTENTION, _HEAD_NORMS)
    _need_words(attention, _ATTENTION_WORDS)
    _need_children("mlp", mlp, _MLP)
    _need_words(mlp, _MLP_WORDS)
    for name, part in layer.named_modules():
        _need_plain(name or "it", part)
        if name.endswith("_proj"):
            _need(type(part) is nn.Linear, f"{name} is no plain linear layer, but {_kind(part)}")
            reason = why_unusual(part.weight)
            _need(reason is None, f"{name}: {reason}")
            _need(part.weight.dtype == like.dtype, f"{name} is {part.weight.dtype}")
            allowed = {"weight", "bias"}
        elif name.endswith("norm"):
            _need_words(part, _NORM_WORDS)
            allowed = {"weight"}
        elif name.endswith("act_fn"):
            _need(type(part).__module__ in _ACTIVATIONS, f"{name} is {_kind(part)}")
            allowed = set()
        else:
            allowed = set()
        own = {key for key, _ in [*part.named_parameters(recurse=False), *_buffers(part)]}
        _need(own <= allowed, f"{name or 'it'} has {', '.join(sorted(own - allowed))}")


def _need_children(name: str, part: nn.Module, needed: set[str], more: set[str] = set()) -> None:  # noqa: B006  # never changed
    """`more` may be there, all or none."""
    found = {child for child, _ in part.named_children()}
    _need(found in (needed, needed | more), f"{name} holds {', '.join(sorted(found))}")


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
