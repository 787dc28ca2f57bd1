"""When tokens of an answer came, and what our runtime counted: what `bench` hears of a method."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from selfspec.decoding.stats import GenerationStats
from selfspec.eval.methods import Written


class Arrivals(BaseStreamer):
    """When tokens came."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.heard: list[tuple[int, float]] = []
        """Tokens that came together, and when."""
        self._now = now
        self._prompt_came = False

    def put(self, value: Tensor) -> None:
        """Hugging Face gives the prompt first, then tokens."""
        if self._prompt_came:
            self.heard.append((value.numel(), self._now()))
        self._prompt_came = True

    def end(self) -> None:
        """Nothing is left to do."""


def arrivals(
    heard: Sequence[tuple[int, float]], start: float, written: Written
) -> list[tuple[int, float]]:
    """Tokens by the pass that gave them, with the seconds since the pass before.

    Our runtime hands a round's tokens over one by one, so they are put together again.
    """
    if written.rounds:
        ends = itertools.accumulate(len(entry.tokens) for entry in written.rounds)
        sizes = [len(entry.tokens) for entry in written.rounds]
        heard = [(size, heard[end - 1][1]) for size, end in zip(sizes, ends, strict=True)]
    times = [start, *(when for _, when in heard)]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    return [(count, gap) for (count, _), gap in zip(heard, gaps, strict=True)]


def counts(stats: GenerationStats) -> dict[str, dict[str, float]]:
    """What acceptance and the parts of a round are computed from."""
    return {
        "seconds": dict(stats.seconds),
        **{
            name: {str(key): count for key, count in getattr(stats, name).items()}
            for name in (
                "drafted_by_layer",
                "accepted_by_layer",
                "drafted_by_index",
                "accepted_by_index",
            )
        },
    }
