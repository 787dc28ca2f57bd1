"""Matrix products on a CPU from weights that oneDNN has reordered: one pass over memory each.

For a few rows they cost what reading the weights costs, and a row's bits do not depend on how many
others run with it (the plain kernels choose another one for one row than for several). The
operators are private: what torch's own compiler emits for frozen weights.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn


class Product(Protocol):
    """A linear layer ready to run, however its weights are stored. Executors are made of these."""

    nbytes: int
    """Of the weights."""
    dtype: torch.dtype
    """Of what it takes and gives."""

    def __call__(self, rows: Tensor) -> Tensor:
        """[.., in] -> [.., out]."""


_PACK_ROWS = 8
"""Row count that weights are laid out for; any number runs."""


def why_unpackable(weight: Tensor) -> str | None:
    """The reason why products with `weight` cannot be packed here, if there is one."""
    if type(weight.detach()) is not Tensor:
        return f"weights are of type {type(weight.detach()).__name__}"
    if weight.device.type != "cpu":
        return f"weights are on {weight.device}"
    if weight.dtype not in (torch.float32, torch.bfloat16):
        return f"weights are {weight.dtype}"
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return "this torch has no packed products"
    if weight.dtype == torch.bfloat16 and not fast_bfloat16():
        return "this processor has no products in bfloat16 (AVX-512 or AVX-NE-CONVERT)"
    return None


def fast_bfloat16() -> bool:
    """Whether oneDNN computes in bfloat16 on this processor."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class PackedLinear:
    """A linear layer, its weight reordered: a copy."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """[out, in] and [out]."""
        self.nbytes, self.dtype = weight.nbytes, weight.dtype
        self._bias = bias
        self._multiply = torch.ops.mkldnn._linear_pointwise.default  # looked up once
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_ROWS)

    @classmethod
    def of(cls, *parts: nn.Linear, order: Tensor | None = None) -> PackedLinear:
        """Layers side by side; `order` [out] rearranges the rows of the joined weight."""
        weight, bias = torch.cat([part.weight.detach() for part in parts]), None
        if any(part.bias is not None for part in parts):
            none = [part.weight.new_zeros(part.out_features) for part in parts]
            biases: list[Tensor] = [
                one if part.bias is None else part.bias
                for part, one in zip(parts, none, strict=True)
            ]
            bias = torch.cat(biases).detach()
        if order is not None:
            weight, bias = weight[order], None if bias is None else bias[order]
        return cls(weight, bias)

    def __call__(self, rows: Tensor) -> Tensor:
        """[.., in] -> [.., out], both in the weight's dtype."""
        product: Tensor = self._multiply(rows, self._weight, self._bias, "none", [], "")
        return product
