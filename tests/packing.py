"""What each executor of packed weights multiplies with, and which dtypes run here."""

from __future__ import annotations

import torch

from selfspec.model.products import CompiledLinear, PackedLinear

PRODUCTS: dict[str, type[PackedLinear | CompiledLinear]] = {
    "packed": PackedLinear,
    "fused": CompiledLinear,
}
"""By executor."""


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
