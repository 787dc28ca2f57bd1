"""How likely the model found each token: an acceptance rule that notes it, for who asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from selfspec.decoding.acceptance import AcceptanceRule, Proposed, Target, Verdict


class Logprob(NamedTuple):
    """How likely a model found a token, by its own logits; natural logarithms."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """The likeliest tokens in its place and their logarithms, falling."""


class Noting:
    """Another rule, of whose tokens it is noted how likely they were.

    By the model's own logits, before temperature and other processors, as vLLM has it by default.
    """

    def __init__(self, rule: AcceptanceRule, count: int, noted: list[Logprob]) -> None:
        """`count`: of the likeliest tokens that are noted beside; `noted` gets an entry a token."""
        self._rule, self._count, self._noted = rule, count, noted
        self.lossless = rule.lossless

    def verdict(
        self, ids: Tensor, target: Target, row: int, proposed: Sequence[Proposed]
    ) -> Verdict:
        """The other rule's, behind `ids` [1, n]."""
        found = self._rule.verdict(ids, target, row, proposed)
        self._noted.append(logprob(target.row(row)[0], found.token, self._count))
        return found


def logprob(logits: Tensor, token: int, count: int) -> Logprob:
    """Of a token, and of the `count` likeliest; logits [V]."""
    logs = logits.float().log_softmax(-1)
    best = logs.topk(min(count, logs.numel()))
    top = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return Logprob(token, float(logs[token]), tuple(top))
