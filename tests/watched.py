"""A Llama of 8 layers that notes every pass; called by the tests of queues and rounds."""

from __future__ import annotations

import torch
from torch import Tensor

from selfspec.model.backbone import Backbone
from selfspec.model.generic import States
from selfspec.model.kv import Rows
from tests.models import make_model

EXIT_LAYERS = (2, 4, 6)


class WatchedBackbone(Backbone):
    """Notes the positions and layers of every pass, and checks the cache's invariants on entry."""

    def __init__(self) -> None:
        self.runs: list[tuple[list[int], int, int]] = []
        self.passes_until_error = -1
        model = make_model("llama", torch.float64, num_hidden_layers=8)
        super().__init__(model, executor="generic")

    def run(
        self, hidden: Tensor, first: int, last: int, rows: Rows, states: States | None = None
    ) -> Tensor:
        kv = rows.only.kv
        lengths = [kv.length(layer) for layer in range(self.num_layers)]
        assert lengths == sorted(lengths, reverse=True)  # never more in a deeper layer
        start = lengths[first]
        assert set(lengths[first:last]) == {start}
        assert rows.positions.tolist() == list(range(start, start + len(hidden)))
        self.runs.append((rows.positions.tolist(), first, last))
        self.passes_until_error -= 1
        if self.passes_until_error == 0:
            super().run(hidden, first, first + 1, rows)
            raise RuntimeError("out of memory in the second layer of a pass")
        return super().run(hidden, first, last, rows, states)
