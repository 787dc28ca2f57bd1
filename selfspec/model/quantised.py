"""Weights that stay as blocks of a GGUF file, and are numbers wherever somebody reads them.

Comes in: the bytes of a tensor in its file, mapped. Goes out: a tensor of a model like any other
that holds no copy of them: an operator gets the numbers that it reads, which are then forgotten.
Compiled products take the blocks as they are. Made by `hub`; read by transformers' modules.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from selfspec.model.compiled import compiled
from selfspec.model.compiler import KERNELS

_SOURCE = KERNELS / "products.cpp"

_UNCHANGEABLE = (
    "weights that are blocks of a file cannot be changed. Change a copy (copy.deepcopy), or load "
    "the model with executor='generic', which de-quantises it"
)
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]  # a descriptor


class Format(NamedTuple):
    """How ggml keeps weights: whole numbers, in blocks of neighbours of a row."""

    number: int
    """Its place in FORMATS of `gguf.hpp`."""
    inputs: int
    """Of a block."""
    nbytes: int
    """Of a block."""
    scales: tuple[int, ...]
    """Where float16 numbers lie in a block, in bytes."""


FORMATS: Mapping[str, Format] = {
    "Q4_0": Format(0, 32, 18, (0,)),
    "Q4_1": Format(1, 32, 20, (0, 2)),
    "Q4_K": Format(2, 256, 144, (0, 2)),
    "Q5_0": Format(3, 32, 22, (0,)),
    "Q8_0": Format(4, 32, 34, (0,)),
    "Q5_1": Format(5, 32, 24, (0, 2)),
    "Q5_K": Format(6, 256, 176, (0, 2)),
    "Q6_K": Format(7, 256, 210, (208,)),
}
"""Those that stay as they are."""

ZEROED: Mapping[int, Format] = {
    4: Format(8, 32, 19, (0,)),
    8: Format(9, 32, 35, (0,)),
}
"""By bits: Q4_0 and Q8_0 with a byte behind the scale, which is taken off each number as well."""

DTYPES = (torch.float32, torch.bfloat16)
"""What blocks are expanded to."""


class QuantisedWeight(Tensor):
    """Weights [out, in] of a linear layer or an embedding, as blocks.

    Each has the value that de-quantising gives, rounded to the dtype.
    """

    blocks: Tensor
    """[rows, bytes], uint8."""
    format: Format
    rows: Tensor
    """[out], int64: which of the blocks' rows each output is."""
    kept: Tensor | None
    """Its numbers, after `keep`."""
    inputs: int
    """Its second length: asking such a tensor for its shape is dispatched, which takes longer."""
    numbers: torch.dtype
    """Its dtype, for the same reason."""
    expander: Any
    """The compiled function."""

    @staticmethod
    def __new__(
        cls, blocks: Tensor, kind: Format, dtype: torch.dtype, rows: Tensor | None = None
    ) -> QuantisedWeight:
        """`rows`: all in order, unless given. Raises ValueError where nothing compiles."""
        inner = blocks.shape[1] // kind.nbytes * kind.inputs
        rows = torch.arange(len(blocks)) if rows is None else rows
        made: QuantisedWeight = Tensor._make_wrapper_subclass(cls, (len(rows), inner), dtype=dtype)
        made.blocks, made.format, made.rows, made.kept = blocks, kind, rows, None
        made.inputs, made.numbers = inner, dtype
        made.expander = _expander(dtype, os.environ.get("CXX"))
        return made

    def __repr__(self) -> str:  # type: ignore[override]  # tensors take an option for contents
        return f"QuantisedWeight({list(self.shape)}, {self.dtype})"

    def places(self, rows: Tensor) -> Tensor:
        """Which of the blocks' rows these outputs are."""
        return self.rows[rows].contiguous()

    def keep(self) -> None:
        """Expand once and for all, for whoever runs the model's own modules."""
        self.kept = self.expanded()

    def part(self, rows: Tensor) -> QuantisedWeight:
        """These rows, as blocks."""
        return QuantisedWeight(self.blocks, self.format, self.dtype, self.places(rows))

    def __deepcopy__(self, _memo: object) -> nn.Parameter:
        """A copy is made to be changed, so it is plain."""
        return nn.Parameter(self.expanded().clone(), requires_grad=False)

    def expanded(self, rows: Tensor | None = None) -> Tensor:
        """The numbers of all rows, or of `rows` [..], as a plain tensor; not to be changed."""
        if self.kept is not None:
            return self.kept if rows is None else self.kept[rows]
        places = self.rows if rows is None else self.places(rows.flatten())
        inner = self.inputs
        found = torch.empty(len(places), inner, dtype=self.numbers)
        self.expander(
            self.format.number,
            inner,
            len(places),
            places.data_ptr(),
            self.blocks.data_ptr(),
            found.data_ptr(),
        )
        return found if rows is None else found.view(*rows.shape, inner)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Linear layers as they are with plain weights; embeddings read the rows they need."""
        if func is torch.nn.functional.linear:
            return _linear(*args, **(kwargs or {}))
        if func is torch.nn.functional.embedding and isinstance(args[1], QuantisedWeight):
            return args[1].expanded(args[0])
        if func == _SET_DATA and not isinstance(args[1], QuantisedWeight):
            raise RuntimeError(_UNCHANGEABLE)  # what model.to(dtype) does
        with torch._C.DisableTorchFunctionSubclass():  # else results would be made QuantisedWeights
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # as torch calls it
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """What selects rows expands those; any other operator gets plain numbers."""
        weight, *others = args
        if func in _SAME and isinstance(weight, QuantisedWeight):
            with torch.inference_mode(False):  # autograd counts changes of what it hands out
                made = QuantisedWeight(weight.blocks, weight.format, weight.dtype, weight.rows)
                made.kept = weight.kept
                return made
        if func in _ROWS and isinstance(weight, QuantisedWeight):
            rows = _ROWS[func](len(weight), *others)
            return func(weight.expanded(), *others) if rows is None else weight.expanded(rows)
        if func._schema.is_mutable and isinstance(weight, QuantisedWeight):
            raise RuntimeError(_UNCHANGEABLE)
        return func(*_expanded(args), **_expanded(dict(kwargs or {})))


def in_8_bits(weight: Tensor) -> Tensor:
    """Plain weights [out, in] as the nearest of Q8_0: 32 neighbours of a row share a scale.

    What cannot be kept so stays as it is: blocks, rows that are no multiples of 32, numbers beyond
    float16's. Raises ValueError where nothing compiles.
    """
    kind = FORMATS["Q8_0"]
    if isinstance(weight, QuantisedWeight) or weight.shape[1] % kind.inputs:
        return weight
    groups = weight.float().unflatten(1, (-1, kind.inputs))
    scales = (groups.abs().amax(-1, keepdim=True) / 127).half()
    if not bool(scales.isfinite().all()):
        return weight
    numbers = (groups / scales.float().clamp(min=1e-30)).round_().clamp_(-127, 127)
    parts = scales.view(torch.uint8), numbers.to(torch.int8).view(torch.uint8)
    return QuantisedWeight(torch.cat(parts, dim=-1).flatten(1), kind, weight.dtype)


def keep_numbers(model: nn.Module) -> None:
    """Expand all weights of `model` that are blocks, once: it is then as fast as any other."""
    for weight in model.parameters():
        if isinstance(weight, QuantisedWeight):
            weight.keep()


_PIECE = 1 << 22
"""Weights that a linear layer expands at a time: they stay in the cache, and memory is reused."""


def _linear(input: Any, weight: Any, bias: Tensor | None = None) -> Tensor:  # noqa: A002  # torch's
    """As that of torch; large weights are made, used and forgotten piece by piece."""
    whole = torch.nn.functional.linear
    rows = max(1, _PIECE // weight.shape[1])
    x = _expanded(input)
    if not isinstance(weight, QuantisedWeight) or weight.kept is not None or len(weight) <= rows:
        return whole(x, _expanded(weight), bias)
    pieces = torch.arange(len(weight)).split(rows)
    parts = [
        whole(x, weight.expanded(piece), None if bias is None else bias[piece]) for piece in pieces
    ]
    return torch.cat(parts, dim=-1)


def _expanded(values: Any) -> Any:
    return tree_map_only(QuantisedWeight, QuantisedWeight.expanded, values)


def _of_slice(
    count: int, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor | None:
    return torch.arange(count)[start:end:step] if dim == 0 else None


def _of_index(count: int, indices: Sequence[Tensor | None]) -> Tensor | None:
    (index,) = indices if len(indices) == 1 else (None,)
    return None if index is None else torch.arange(count)[index]


_aten = torch.ops.aten
_SAME = {_aten.detach.default, _aten.alias.default}
_ROWS: Mapping[Any, Callable[..., Tensor | None]] = {
    _aten.slice.Tensor: _of_slice,
    _aten.index.Tensor: _of_index,
    _aten.index_select.default: lambda count, dim, index: _of_index(count, [index][dim:]),
}
"""Operators that read rows: which ones, or None where they read something else."""


@cache
def _expander(dtype: torch.dtype, _compiler: str | None) -> Any:
    """Of `products.cpp`. Raises ValueError, with the reason, where there is none."""
    found = compiled(_SOURCE, BFLOAT16=int(dtype == torch.bfloat16)).expand_blocks
    found.argtypes = (*(ctypes.c_long,) * 3, *(ctypes.c_void_p,) * 3)
    found.restype = None
    return found
