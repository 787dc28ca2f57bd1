"""Penalties for tokens that an answer has already, as OpenAI defines them."""

from __future__ import annotations

from torch import Tensor
from transformers import LogitsProcessor


class OccurrencePenalty(LogitsProcessor):
    """Takes `presence` off the score of every token that the answer has, and `frequency` each time.

    The prompt does not count. What it gives depends on the prefix alone.
    """

    stateless = True

    def __init__(self, presence: float, frequency: float, start: int) -> None:
        """`start`: ids in front of the answer, padding included."""
        self._presence, self._frequency, self._start = presence, frequency, start

    def for_row(self, _row: int) -> OccurrencePenalty:
        """Rows of a batch are treated alike."""
        return self

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """[1, n], [1, V] -> [1, V]."""
        tokens, counts = input_ids[0, self._start :].unique(return_counts=True)
        lowered = scores.clone()
        lowered[0, tokens] -= self._presence + self._frequency * counts
        return lowered
