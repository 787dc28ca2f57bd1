"""What each executor of packed weights multiplies with, and which dtypes run here."""

from __future__ import annotations

from typing import Any

import torch

from selfspec.model.executors.fused_cpu import FusedExecutor
from selfspec.model.products import CompiledLinear, PackedLinear

PRODUCTS: dict[str, type[PackedLinear | CompiledLinear]] = {
    "packed": PackedLinear,
    "fused": CompiledLinear,
}
"""By executor."""


EXACT: dict[tuple[type, str], Any] = {
    (PackedLinear, "__call__"): PackedLinear.__call__,
    (FusedExecutor, "logits"): FusedExecutor.logits,
}
"""Products that a test can replace; what the fused executor computes before is compiled code."""


def _runs(executor: str, dtype: torch.dtype) -> bool:
    try:
        PRODUCTS[executor](torch.zeros(1, 1, dtype=dtype))
    except ValueError:
        return False
    return True


RUNNING = [
    (executor, dtype)
    for executor in PRODUCTS
    for dtype in (torch.float32, torch.bfloat16)
    if _runs(executor, dtype)
]
"""Without a compiler the fused one is missing; without AVX-512 or the like bfloat16 packed."""

RUNNING_BFLOAT16 = [
    "generic",
    *(executor for executor, dtype in RUNNING if dtype == torch.bfloat16),
]
"""Executors that take a bfloat16 model."""

PINNED_DTYPE = "bfloat16" if len(RUNNING_BFLOAT16) > 1 else "float32"
"""For the default model, where a test needs rows that round alike and no dtype of its own."""
