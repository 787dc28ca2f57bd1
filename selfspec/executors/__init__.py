"""How layers a..b are run. The backbone chooses one executor for a model."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from selfspec.kv_cache import KVCache


class Executor(Protocol):
    """Runs a range of decoder layers on a block of rows."""

    def run(self, hidden: Tensor, first: int, last: int, positions: Tensor, kv: KVCache) -> Tensor:
        """Layers first+1..last on [B, T, d] at `positions` [B, T]; appends T positions to `kv`."""
