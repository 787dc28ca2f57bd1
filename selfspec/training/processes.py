"""Several processes that fit or cache together, as `accelerate launch` or `torchrun` start them.

Each takes its share of the batches of a step; gradients and losses are added up, so that the step
is the one that a single process would take.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import reduce
from torch import nn

Item = TypeVar("Item")


class Processes:
    """This process among its peers; alone unless a launcher started several."""

    def __init__(self, state: PartialState | None = None) -> None:
        """`state` None: alone."""
        self._state = state
        self.rank = 0 if state is None else state.process_index
        self.count = 1 if state is None else state.num_processes

    @classmethod
    def launched(cls) -> Processes:
        """As the launcher's environment says."""
        alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
        # left to itself, PartialState takes processes on a CPU for strangers
        return cls() if alone else cls(PartialState(cpu=not torch.accelerator.is_available()))

    @property
    def device(self) -> str | None:
        """Where this process should compute; None: where the model is put by default."""
        if self._state is None or self._state.device.type == "cpu":
            return None
        return str(self._state.device)

    @property
    def is_main(self) -> bool:
        """Whether this one writes the results."""
        return self.rank == 0

    def share(self, items: Sequence[Item]) -> Sequence[Item]:
        """This process's part of `items`."""
        return items[self.rank :: self.count]

    def add_up(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace gradients by their sums over all processes."""
        if self.count == 1:
            return
        for parameter in parameters:
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = reduce(grad, reduction="sum")

    def total(self, values: dict[int, float]) -> dict[int, float]:
        """Sums over all processes, key by key."""
        if self.count == 1 or self._state is None:
            return values
        summed = reduce(
            torch.tensor(list(values.values()), dtype=torch.float32, device=self._state.device),
            reduction="sum",
        )
        return dict(zip(values, summed.tolist(), strict=True))

    def wait(self) -> None:
        """Until all are here."""
        if self._state is not None:
            self._state.wait_for_everyone()
