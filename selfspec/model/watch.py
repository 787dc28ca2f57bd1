"""Notices that a model is no longer what was wrapped: weights, modules, hooks, switches.

Comes in: a model, when it is wrapped. Goes out: what has changed since, in words, or nothing. Asked
at the beginning of every request, so it looks at counters, addresses and a few bytes, never at
whole weights. Called by the backbone.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from selfspec.model.executors.known import foreign_hooks

_SAMPLE = 64
"""Bytes looked at in the middle of a tensor: changes made through `.data` move no counter."""

_SWITCHES = (
    *("_disable_adapters", "_active_adapter", "merged_adapters", "scaling"),
    *("head_dim", "is_causal", "sliding_window", "variance_epsilon", "eps"),
)
"""Plain attributes of modules that change what they compute; the first four are those of PEFT."""

_PLAIN = {Tensor, nn.Parameter, nn.Buffer}
"""Kinds of tensors that hide no others."""

_read = ctypes.string_at


class _Weight(NamedTuple):
    """One parameter or buffer, as it was."""

    place: dict[str, Any]
    key: str
    path: str
    tensor: Tensor
    dtype: torch.dtype
    device: torch.device
    version: int | None
    """None for tensors that do not count changes."""
    pointer: int | None
    """None for tensors made of other tensors."""
    sample_at: int
    sample: bytes


class _Part(NamedTuple):
    """One module, as it was."""

    path: str
    module: nn.Module
    own: dict[str, Any]
    """The module's own attributes."""
    children: dict[str, nn.Module | None]
    weights: int
    """Parameters and buffers."""
    replaced: bool
    """Whether other code was put around its forward."""
    hooks: list[Any]


class ModelWatch:
    """A model as it is now, to compare with what it is later."""

    def __init__(self, model: nn.Module) -> None:
        """Reads nothing but a few bytes of each weight."""
        parts = list(model.named_modules())
        self._parts = [_part(path, module) for path, module in parts]
        self._weights = [weight for path, module in parts for weight in _weights(path, module)]
        self._switches = [
            (vars(module), name, copy.copy(vars(module)[name]), path)
            for path, module in parts
            for name in _SWITCHES
            if name in vars(module)
        ]

    def change(self) -> str | None:
        """What is not as it was, or None."""
        return self._changed_part() or self._changed_weight() or self._changed_switch()

    def _changed_part(self) -> str | None:
        for path, module, own, children, weights, replaced, hooks in self._parts:
            if own["_modules"] != children:
                return f"{path} has other modules"
            if len(own["_parameters"]) + len(own["_buffers"]) != weights:
                return f"{path} has other weights"
            if ("forward" in own or "_hf_hook" in own) is not replaced:
                return f"the forward of {path} was replaced"
            hooked = own["_forward_hooks"] or own["_forward_pre_hooks"] or hooks
            if hooked and foreign_hooks(module) != hooks:
                return f"{path} has other hooks"
        return None

    def _changed_weight(self) -> str | None:
        for place, key, path, tensor, dtype, device, version, pointer, at, sample in self._weights:
            now = place.get(key)
            if now is not tensor and (now is None or not (now.is_meta and tensor.is_meta)):
                return f"{path} was replaced"
            if now.dtype is not dtype:
                return f"{path} was cast from {dtype} to {now.dtype}"
            if pointer is not None and now.data_ptr() != pointer:
                moved = now.device != device
                return f"{path} was " + (f"moved to {now.device}" if moved else "replaced")
            if version is not None and now._version != version:
                return f"{path} was changed"
            if sample and _read(at, len(sample)) != sample:
                return f"{path} was changed"
        return None

    def _changed_switch(self) -> str | None:
        for place, name, value, path in self._switches:
            if place.get(name) != value:
                return f"{name} of {path} was changed"
        return None


def _part(path: str, module: nn.Module) -> _Part:
    own = vars(module)
    return _Part(
        path or "the model",
        module,
        own,
        dict(module._modules),
        len(module._parameters) + len(module._buffers),
        "forward" in own or "_hf_hook" in own,
        foreign_hooks(module),
    )


def _weights(path: str, module: nn.Module) -> Iterator[_Weight]:
    for place in (module._parameters, module._buffers):
        for key, tensor in place.items():
            if tensor is not None:
                yield _weight(place, key, f"{path}.{key}" if path else key, tensor)


def _weight(place: dict[str, Any], key: str, path: str, tensor: Tensor) -> _Weight:
    offloaded = tensor.is_meta  # another object after every pass
    version = None if offloaded or tensor.is_inference() else tensor._version
    pointer, at, length = None, 0, 0
    if type(tensor) in _PLAIN and not offloaded:
        pointer = tensor.data_ptr()
        if tensor.is_cpu and tensor.is_contiguous():
            length = min(_SAMPLE, tensor.nbytes)
            at = pointer + (tensor.nbytes - length) // 2
    sample = _read(at, length) if length else b""
    return _Weight(
        place, key, path, tensor, tensor.dtype, tensor.device, version, pointer, at, sample
    )
