"""Simulated devices for a machine without accelerators: tensors that claim another device.

While they are open, tensors remember their device, and an operator whose tensors are on different
devices fails as in CUDA. Copies, and indices and scalars in main memory, are allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

FIRST, SECOND = torch.device("maia", 0), torch.device("maia", 1)
"""A device type that torch knows and this machine lacks."""

_HOST = torch.device("cpu")
_COPIES = {Tensor.copy_, torch._foreach_copy_, torch._has_compatible_shallow_copy_type}


@contextmanager
def stand_ins() -> Iterator[None]:
    """Provide FIRST and SECOND while open; random generators stay in main memory."""
    generator, original = torch.Generator, torch._C._nn._parse_to

    def parse(*args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], Tensor):
            return place(args[0]), args[0].dtype, False, None
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, _Places():
        patch.setattr(torch, "Generator", lambda _=None: generator())
        patch.setattr(torch._C._nn, "_parse_to", parse)
        yield


class _Places(TorchFunctionMode):
    """Tracks the device of each tensor by its memory."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function == Tensor.device.__get__:
            return place(args[0])
        if function in (Tensor.to, Tensor.cpu):
            return _moved(*args, **kwargs) if function == Tensor.to else _moved(args[0], _HOST)
        device = kwargs.pop("device", None)
        if str(device) == "meta":
            return function(*args, **kwargs, device=device)
        target = _agreed(function, args, kwargs) if device is None else torch.device(device)
        output = function(*args, **kwargs)
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor):
                _put(leaf, target)
        return output


def place(tensor: Tensor) -> torch.device:
    device = tensor.device
    return device if device.type == "meta" else getattr(tensor.untyped_storage(), "place", device)


def _put(tensor: Tensor, device: torch.device) -> None:
    """Set the device of a tensor's memory, unless it has one, as for a view."""
    if tensor.device.type != "meta" and not hasattr(tensor.untyped_storage(), "place"):
        tensor.untyped_storage().place = device  # type: ignore[attr-defined]


def _moved(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    kwargs.pop("copy", None)
    device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    target = place(tensor) if device is None else device
    if target.type == "meta":
        return tensor.to(target, dtype)
    output = tensor if dtype is None else tensor.to(dtype)
    if output is tensor and target == place(tensor):
        return tensor
    output = output.detach().clone() if output is tensor else output
    _put(output, target)
    return output


def _agreed(function: Any, args: Any, kwargs: Any) -> torch.device:
    """The common device of an operator's tensors. Raises RuntimeError, as CUDA does."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    data: Any = Tensor.data
    free = function in _COPIES or function == data.__set__
    places = [place(tensor) for tensor in tensors if tensor.dim() or place(tensor) != _HOST]
    if function in (Tensor.__getitem__, Tensor.__setitem__):
        places[1:] = [device for device in places[1:] if device not in (_HOST, places[0])]
        free = function == Tensor.__setitem__ and not any(
            isinstance(leaf, Tensor) for leaf in tree_leaves(args[1])
        )
    if len(set(places)) > 1 and not free:
        devices = " and ".join(map(str, dict.fromkeys(places)))
        name = getattr(function, "__name__", function)
        raise RuntimeError(f"{name}: expected all tensors on one device, found {devices}")
    return places[0] if places else _HOST
