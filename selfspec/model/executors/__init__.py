"""How layers a..b are run. The backbone chooses one executor for a model."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from selfspec.model.kv_cache import KVCache


class Executor(Protocol):
    """Runs a range of decoder layers on a block of rows, and the way from there to logits."""

    min_rows: int
    """Passes are padded to this many rows. More than 1 claims, for the probe to test, that from
    there on a row's bits do not depend on how many others run with it."""

    def run(self, hidden: Tensor, first: int, last: int, positions: Tensor, kv: KVCache) -> Tensor:
        """Layers first+1..last on [B, T, d] at `positions` [B, T]; appends T positions to `kv`."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Output of layer L, [B, T, d] -> final norm and lm_head, [B, T, V]."""
