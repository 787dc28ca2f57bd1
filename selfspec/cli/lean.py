"""Imports of transformers that no command uses are put off, where a process is a command's own.

They are torch's compiler, distributed tensors and sympy under both: 1,000 of 2,800 modules.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

own_process = False
"""Whether the process runs one command and nothing else."""

_ASKED = ("is_torch_distributed_available", "is_torch_flex_attn_available")
"""What transformers asks before it imports those parts; torch is also built without them."""


class _Later(ModuleType):
    """A module that runs when somebody asks for what it was not given, or for a part of it."""

    def __getattr__(self, name: str) -> Any:
        spec = self.__spec__
        if spec is None or spec.loader is None or (name[:2] == "__" and name != "__path__"):
            raise AttributeError(name)
        self.__class__ = ModuleType  # type: ignore[assignment]  # from here on one like any other
        vars(self)["__path__"] = spec.submodule_search_locations
        spec.loader.exec_module(self)
        return getattr(self, name)


def import_little() -> None:
    """Import transformers without them, unless others share the process, or it is one of several.

    The compiler's marks on functions do nothing, as they do wherever nothing is compiled. torch
    asks for the class DTensor when it first meets a weight of ours; no tensor is of that class.
    """
    if not own_process or "transformers" in sys.modules or "RANK" in os.environ:
        return
    import torch

    marks = dict.fromkeys(("allow_in_graph", "assume_constant_result", "disable"), _same)
    _put_off("torch._dynamo", "_trace_wrapped_higher_order_op", **marks)  # a part for masks
    if torch.distributed.is_available():
        _put_off("torch.distributed.tensor", DTensor=type("DTensor", (), {}))
    from transformers import utils

    for module in (utils, utils.import_utils):
        vars(module).update(dict.fromkeys(vars(module).keys() & _ASKED, lambda: False))


def _put_off(name: str, *parts: str, **given: Any) -> None:
    """A module, but for `parts` that stand alone."""
    if name in sys.modules or (spec := find_spec(name)) is None:
        return
    sys.modules[name] = module = _Later(name)
    vars(module).update(given, __spec__=spec, __path__=spec.submodule_search_locations)
    parent, _, own = name.rpartition(".")
    setattr(sys.modules[parent], own, module)
    for part in parts:
        import_module(f"{name}.{part}")
    del vars(module)["__path__"]


def _same(function: Any = None, *_: Any, **__: Any) -> Any:
    """In place of a decorator, with or without arguments of its own."""
    return _same if function is None else function
