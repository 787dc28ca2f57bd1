"""Around the forward of modules: hooks of ours that look on, and code of others, named.

`captured_outputs` shows what a normal forward pass computes layer by layer: for conformance checks,
training, tracing. `require_own_code` is asked by executors that run something in a module's place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from selfspec.model.parts import FULL, SLIDING, DecoderParts, attention_types

_IDLE = ("transformers.utils.output_capturing", "selfspec.model.hooks")
"""Where hooks come from that change nothing: transformers leaves some behind after a call with
output_hidden_states."""

_OWN = ("torch", "transformers", "selfspec")
"""Packages whose code an executor may replace, or capture, once its numbers agree."""


@contextmanager
def captured_outputs(
    modules: Sequence[nn.Module], done: Callable[[nn.Module], object] = lambda _: None
) -> Iterator[dict[int, Tensor]]:
    """While open, each forward pass stores what `modules[i]` returned under key i.

    `done` is called with each module that has returned.

    Yields a dict that is filled by the passes, [B, T, d] per module; a later pass replaces the
    values of an earlier one. No hook is left behind, also after an exception.
    """
    outputs: dict[int, Tensor] = {}

    def store(index: int) -> object:
        def hook(module: nn.Module, _args: object, output: Tensor | tuple[Tensor, ...]) -> None:
            outputs[index] = output[0] if isinstance(output, tuple) else output
            done(module)

        return hook

    handles = []
    try:
        for index, module in enumerate(modules):
            handles.append(module.register_forward_hook(store(index)))  # type: ignore[arg-type]  # torch types hooks as Callable[..., Any]
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def foreign_hooks(part: nn.Module) -> list[Any]:
    """Hooks around the module's forward, without those that are idle or only look on for us."""
    hooks = [*part._forward_hooks.values(), *part._forward_pre_hooks.values()]
    return [hook for hook in hooks if getattr(hook, "__module__", None) not in _IDLE]


def require_own_code(decoder: DecoderParts, lm_head: nn.Module) -> None:
    """Raise ValueError unless layers, norm and lm_head run the code of torch and transformers.

    What another executor computes is compared in numbers, which cannot see what happens at other
    inputs: a branch on values, a count of calls, something that looks on, a bound that few values
    reach. Released code of a family does none of it but for what its config says.
    """
    config: Any = decoder.config
    attention = config._attn_implementation
    _need(attention in ("sdpa", "eager"), f"attention is {attention}, expected sdpa or eager")
    registered = getattr(ALL_ATTENTION_FUNCTIONS.get("sdpa"), "__module__", "")
    _need(attention == "eager" or _is_own(registered), "another sdpa attention is registered")
    _need(getattr(config, "is_causal", True) is not False, "attention is not causal")
    others = set(attention_types(config)) - {FULL, SLIDING}
    _need(not others, f"layers have {', '.join(sorted(others))}")
    _need(decoder.rotary_emb is not None, "positions are not rotated")
    clip = getattr(config, "clip_qkv", None)
    _need(clip is None, f"queries, keys and values are clipped to {clip}")
    every = [*torch_module._global_forward_hooks, *torch_module._global_forward_pre_hooks]
    _need(not every, "hooks are set for all modules")
    for name, part in (*decoder.layers.named_modules(prefix="layers"), ("lm_head", lm_head)):
        _require_own_call(name, part)
    _require_own_call("norm", decoder.norm)


def _require_own_call(name: str, part: nn.Module) -> None:
    """Calling the module must be calling its class's forward, of our packages."""
    kind = type(part)
    _need(not foreign_hooks(part) and not hasattr(part, "_hf_hook"), f"{name} has hooks")
    _need("forward" not in vars(part), f"the forward of {name} was replaced")
    _need(getattr(part, "_compiled_call_impl", None) is None, f"{name} is compiled")
    functions: list[Any] = [kind.__call__, kind.forward]
    for function in functions:
        home = getattr(function, "__globals__", {}).get("__name__", "")
        _need(_is_own(home), f"{name} ({kind.__name__}) runs code of {home or 'no module'}")
        if hasattr(function, "__wrapped__"):
            functions.append(function.__wrapped__)


def _is_own(module: str) -> bool:
    return module.split(".")[0] in _OWN


def _need(condition: bool, otherwise: str) -> None:
    if not condition:
        raise ValueError(otherwise)
