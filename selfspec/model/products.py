"""Matrix products on a CPU: a copy of the weight, laid out for one pass over memory each.

For a few rows they cost what reading the weights costs. `CompiledLinear` is ours: a row's bits
depend on the row alone, whatever runs beside it. `PackedLinear` is oneDNN's, for machines without
a compiler: from two rows on, up to a block's worth, a row's bits do not depend on how many others
run with it. Its operators are private: what torch's own compiler emits for frozen weights.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from selfspec.model.compiled import compiled


class Product(Protocol):
    """A linear layer ready to run, however its weights are stored. Executors are made of these."""

    nbytes: int
    """Of the weights."""
    dtype: torch.dtype
    """Of what it takes and gives."""

    def __call__(self, rows: Tensor) -> Tensor:
        """[.., in] -> [.., out]."""


def why_unusual(weight: Tensor) -> str | None:
    """The reason why no product here takes `weight`, if there is one."""
    if type(weight.detach()) is not Tensor:
        return f"weights are of type {type(weight.detach()).__name__}"
    if weight.device.type != "cpu":
        return f"weights are on {weight.device}"
    if weight.dtype not in (torch.float32, torch.bfloat16):
        return f"weights are {weight.dtype}"
    return None


def joined(parts: Sequence[nn.Linear], order: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of layers side by side, their outputs rearranged by `order` [out].

    Of one layer as it is they are its own, no copy: an unembedding may be large.
    """
    weights, bias = [part.weight.detach() for part in parts], None
    weight = torch.cat(weights) if len(weights) > 1 else weights[0]
    if any(part.bias is not None for part in parts):
        biases = [
            part.weight.new_zeros(part.out_features) if part.bias is None else part.bias.detach()
            for part in parts
        ]
        bias = torch.cat(biases)
    if order is not None:
        weight, bias = weight[order], None if bias is None else bias[order]
    return weight, bias


_SOURCE = Path(__file__).parent / "kernels" / "products.cpp"

PANEL = 16
"""Outputs side by side, as in `panels.hpp`."""


class CompiledLinear:
    """A linear layer by `products.cpp`, its weight laid out in panels: a copy."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """[out, in] and [out]. Raises ValueError, with the reason, where nothing compiles."""
        self.dtype = weight.dtype
        self.out_features, self.in_features = weight.shape
        (self.panels,) = in_panels(weight[None])
        self.nbytes = self.panels.nbytes
        self.bias = None if bias is None else bias.contiguous()
        self._product = _library(weight.dtype, os.environ.get("CXX")).product

    @classmethod
    def of(cls, *parts: nn.Linear, order: Tensor | None = None) -> CompiledLinear:
        """Layers side by side; `order` [out] rearranges their outputs."""
        return cls(*joined(parts, order))

    def __call__(self, rows: Tensor) -> Tensor:
        """[.., in] -> [.., out], both in the weight's dtype; ValueError for anything else."""
        if rows.dtype != self.dtype or rows.shape[-1] != self.in_features:  # else memory is misread
            raise ValueError(f"rows are {rows.dtype} {tuple(rows.shape)}, not of this layer")
        rows = rows.contiguous()
        result = rows.new_empty(*rows.shape[:-1], self.out_features)
        self._product(
            rows.numel() // self.in_features,
            self.in_features,
            self.out_features,
            rows.data_ptr(),
            self.panels.data_ptr(),
            None if self.bias is None else self.bias.data_ptr(),
            result.data_ptr(),
        )
        return result


def in_panels(weights: Tensor) -> Tensor:
    """Weights [E, out, in] of linear layers as compiled code reads them, [E, ..]: a copy.

    Raises ValueError, with the reason, where nothing compiles.
    """
    library = _library(weights.dtype, os.environ.get("CXX"))
    count, outputs, inner = weights.shape
    odd = inner % 2 if weights.dtype == torch.bfloat16 else 0
    panels = weights.new_empty(count, -(-outputs // PANEL) * PANEL * (inner + odd))
    for weight, to in zip(weights, panels, strict=True):
        weight = weight.contiguous()
        library.pack(inner, outputs, weight.data_ptr(), to.data_ptr())
    return panels


@cache
def _library(dtype: torch.dtype, _compiler: str | None) -> ctypes.CDLL:
    """The functions of `products.cpp`. Raises ValueError, with the reason, if there are none."""
    library = compiled(_SOURCE, BFLOAT16=int(dtype == torch.bfloat16))
    library.pack.argtypes = (*(ctypes.c_long,) * 2, *(ctypes.c_void_p,) * 2)
    library.product.argtypes = (*(ctypes.c_long,) * 3, *(ctypes.c_void_p,) * 4)
    library.pack.restype = library.product.restype = None
    return library


class PackedLinear:
    """A linear layer by oneDNN, its weight reordered: a copy."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """[out, in] and [out]. Raises ValueError, with the reason, where torch has no such."""
        if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
            raise ValueError("this torch has no packed products")
        if weight.dtype == torch.bfloat16 and not fast_bfloat16():
            raise ValueError(
                "this processor has no products in bfloat16 (AVX-512 or AVX-NE-CONVERT)"
            )
        self.nbytes, self.dtype = weight.nbytes, weight.dtype
        self._bias = bias
        self._multiply = torch.ops.mkldnn._linear_pointwise.default  # looked up once
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_ROWS)

    @classmethod
    def of(cls, *parts: nn.Linear, order: Tensor | None = None) -> PackedLinear:
        """Layers side by side; `order` [out] rearranges their outputs."""
        return cls(*joined(parts, order))

    def __call__(self, rows: Tensor) -> Tensor:
        """[.., in] -> [.., out], both in the weight's dtype."""
        product: Tensor = self._multiply(rows, self._weight, self._bias, "none", [], "")
        return product


_PACK_ROWS = 8
"""Row count that oneDNN lays weights out for; any number runs."""


def fast_bfloat16() -> bool:
    """Whether oneDNN computes in bfloat16 on this processor."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def draft_product(rows: Tensor) -> Product:
    """The cheapest product with `rows` [V_draft, d] for drafts, which need few digits.

    In bfloat16 where products compute in it. Raises ValueError where there is none.
    """
    try:
        return CompiledLinear(rows.to(torch.bfloat16))
    except ValueError:
        return PackedLinear(rows.to(torch.bfloat16) if fast_bfloat16() else rows)
