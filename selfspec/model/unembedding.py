"""A model's own way from a hidden state to logits, which its exit heads share."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn


class Unembedding(NamedTuple):
    """A model's own way from a hidden state to logits; its tensors are shared, never copied."""

    weight: Tensor
    """[V, d]"""
    norm: nn.Module
    """The final norm."""
    finish: Callable[[Tensor], Tensor]
    """What the model does behind the matrix product (scaling, soft-capping); gives float32."""
    bias: Tensor | None = None
    """[V], added to the matrix product where lm_head has one."""
