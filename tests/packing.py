"""Which weights this processor can pack; asked by tests of what packed weights compute."""

from __future__ import annotations

import torch

from selfspec.model.products import why_unpackable
from tests.models import PACKED_EXECUTORS

PACKABLE = [
    dtype
    for dtype in (torch.float32, torch.bfloat16)
    if why_unpackable(torch.empty(0, dtype=dtype)) is None
]
"""Without AVX-512 or the like it is float32 alone."""

RUNNING_BFLOAT16 = ["generic", *(PACKED_EXECUTORS if torch.bfloat16 in PACKABLE else ())]
"""Executors that take a bfloat16 model."""

PINNED_DTYPE = "bfloat16" if torch.bfloat16 in PACKABLE else "float32"
"""For the default model, where a test needs rows that round alike and no dtype of its own."""
