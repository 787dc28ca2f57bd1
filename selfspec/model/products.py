"""Linear layers by compiled code on a CPU: a copy of the weight, laid out for one pass over memory.

For a few rows they cost what reading the weights costs. A row's bits depend on the row alone,
whatever runs beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from selfspec.model.panels import Stripes, library
from selfspec.model.quantised import DTYPES, QuantisedWeight


def why_unusual(weight: Tensor) -> str | None:
    """The reason why no product here takes `weight`, if there is one."""
    if type(weight.detach()) not in (Tensor, QuantisedWeight):
        return f"weights are of type {type(weight.detach()).__name__}"
    if weight.device.type != "cpu":
        return f"weights are on {weight.device}"
    if weight.dtype not in DTYPES:
        return f"weights are {weight.dtype}"
    return None


class CompiledLinear:
    """A linear layer by `products.cpp`, its weight laid out in panels: a copy."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """[out, in] and [out]. Raises ValueError, with the reason, where nothing compiles."""
        self._set([weight], bias, None)

    @classmethod
    def of(cls, *parts: nn.Linear, order: Tensor | None = None) -> CompiledLinear:
        """Layers side by side; `order` [out] rearranges their outputs."""
        bias = None
        if any(part.bias is not None for part in parts):
            biases: list[Tensor] = [
                part.weight.new_zeros(part.out_features) if part.bias is None else part.bias
                for part in parts
            ]
            bias = torch.cat(biases).detach()
            bias = bias if order is None else bias[order]
        made = cls.__new__(cls)
        made._set([part.weight.detach() for part in parts], bias, order)
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
