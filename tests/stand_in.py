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
    generator, parsed = torch.Generator, torch._C._nn._parse_to

    def parse(*args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], Tensor):
            return place(args[0]), args[0].dtype, False, None
        return parsed(*args, **kwargs)

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
        asked = kwargs.pop("device", None)
        if str(asked) == "meta":
            return function(*args, **kwargs, device=asked)
        where = _agreed(function, args, kwargs) if asked is None else torch.device(asked)
        found = function(*args, **kwargs)
        for one in tree_leaves(found):
            if isinstance(one, Tensor):
                _put(one, where)
        return found


def place(tensor: Tensor) -> torch.device:
    own = tensor.device
    return own if own.type == "meta" else getattr(tensor.untyped_storage(), "place", own)


def _put(tensor: Tensor, where: torch.device) -> None:
    """Set the device of a tensor's memory, unless it has one, as for a view."""
    if tensor.device.type != "meta" and not hasattr(tensor.untyped_storage(), "place"):
        tensor.untyped_storage().place = where  # type: ignore[attr-defined]


def _moved(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    kwargs.pop("copy", None)
    named, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    where = place(tensor) if named is None else named
    if where.type == "meta":
        return tensor.to(where, dtype)
    found = tensor if dtype is None else tensor.to(dtype)
    if found is tensor and where == place(tensor):
        return tensor
    found = found.detach().clone() if found is tensor else found
    _put(found, where)
    return found


def _agreed(function: Any, args: Any, kwargs: Any) -> torch.device:
    """The common device of an operator's tensors. Raises RuntimeError, as CUDA does."""
    tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
    data: Any = Tensor.data
    free = function in _COPIES or function == data.__set__
    places = [place(one) for one in tensors if one.dim() or place(one) != _HOST]
    if function in (Tensor.__getitem__, Tensor.__setitem__):
        places[1:] = [one for one in places[1:] if one not in (_HOST, places[0])]
        free = function == Tensor.__setitem__ and not any(
            isinstance(one, Tensor) for one in tree_leaves(args[1])
        )
    if len(set(places)) > 1 and not free:
        found = " and ".join(map(str, dict.fromkeys(places)))
        name = getattr(function, "__name__", function)
        raise RuntimeError(f"{name}: expected all tensors on one device, found {found}")
    return places[0] if places else _HOST
