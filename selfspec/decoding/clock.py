"""Times works in turns: works by name come in, seconds go out.

In turns, so that a change of the machine's speed meets all alike, and each work finds the
processor's caches as full of other things as it does in a round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import torch

Name = TypeVar("Name", bound=Hashable)


class Clock:
    """Runs works on one device a few times."""

    def __init__(
        self,
        device: torch.device,
        repeats: int,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`repeats`: at least 1. `now` gives seconds; tests inject their own."""
        self.device = device
        self._repeats = repeats
        self._now = now

    def seconds(self, works: Mapping[Name, Callable[[], object]]) -> dict[Name, float]:
        """Median seconds of each."""
        return {name: statistics.median(laps) for name, laps in self.laps(works).items()}

    def laps(self, works: Mapping[Name, Callable[[], object]]) -> dict[Name, list[float]]:
        """Seconds of every run, after one that does not count (it captures, and warms up)."""
        found: dict[Name, list[float]] = {name: [] for name in works}
        for _ in range(self._repeats + 1):
            for name, work in works.items():
                self._wait()
                start = self._now()
                work()
                self._wait()
                found[name].append(self._now() - start)
        return {name: laps[1:] for name, laps in found.items()}

    def _wait(self) -> None:
        """Work on an accelerator is queued: let it end."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
