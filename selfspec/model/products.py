"""Matrix products on a CPU: a copy of the weight, laid out for one pass over memory each.

For a few rows they cost what reading the weights costs. `CompiledLinear` is ours: a row's bits
depend on the row alone, whatever runs beside it. `PackedLinear` is oneDNN's, for machines without
a compiler: from two rows on, up to a block's worth, a row's bits do not depend on how many others
run with it. Its operators are private: what torch's own compiler emits for frozen weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from selfspec.model.panels import Stripes, library, side_by_side
from selfspec.model.quantised import DTYPES, QuantisedWeight


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
    if type(weight.detach()) not in (Tensor, QuantisedWeight):
        return f"weights are of type {type(weight.detach()).__name__}"
    if weight.device.type != "cpu":
        return f"weights are on {weight.device}"
    if weight.dtype not in DTYPES:
        return f"weights are {weight.dtype}"
    return None


def joined(parts: Sequence[nn.Linear], order: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of layers side by side, their outputs rearranged by `order` [out].

    The weight of one layer as it is is its own, no copy: an unembedding may be large.
    """
    weight = side_by_side([part.weight.detach() for part in parts], order)
    return weight, joined_bias(parts, order)


def joined_bias(parts: Sequence[nn.Linear], order: Tensor | None) -> Tensor | None:
    """Of layers side by side, their outputs rearranged by `order` [out]; 0 where one has none."""
    if all(part.bias is None for part in parts):
        return None
    biases = [
        part.weight.new_zeros(part.out_features) if part.bias is None else part.bias.detach()
        for part in parts
    ]
    bias = torch.cat(biases)
    return bias if order is None else bias[order]


class CompiledLinear:
    """A linear layer by `products.cpp`, its weight laid out in panels: a copy."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """[out, in] and [out]. Raises ValueError, with the reason, where nothing compiles."""
        self._set([weight], bias, None)

    @classmethod
    def of(cls, *parts: nn.Linear, order: Tensor | None = None) -> CompiledLinear:
        """Layers side by side; `order` [out] rearranges their outputs."""
        made = cls.__new__(cls)
        made._set([part.weight.detach() for part in parts], joined_bias(parts, order), order)
        return made

    def _set(self, weights: Sequence[Tensor], bias: Tensor | None, order: Tensor | None) -> None:
        self.dtype, self.in_features = weights[0].dtype, weights[0].shape[1]
        self.out_features = sum(len(weight) for weight in weights) if order is None else len(order)
        self.stripes = Stripes(weights, order)
        self.nbytes = self.stripes.nbytes
        self.bias = None if bias is None else bias.contiguous()
        self._product = library(self.dtype).product

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
            self.stripes.address,
            None if self.bias is None else self.bias.data_ptr(),
            result.data_ptr(),
        )
        return result


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
