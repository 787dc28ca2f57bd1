"""How likely the model found each token: an acceptance rule that notes it, for who asked."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from selfspec.decoding.acceptance import AcceptanceRule, Proposed, Target, Verdict
from selfspec.decoding.stats import Logprob


class Noting:
    """Another rule, whose verdicts also say how likely their tokens were.

    By the model's own logits, before temperature and other processors, as vLLM has it by default.
    """

    def __init__(self, rule: AcceptanceRule, count: int) -> None:
        """`count`: of the likeliest tokens that are noted beside."""
        self._rule, self._count = rule, count
        self.lossless = rule.lossless

    def verdict(
        self, ids: Tensor, target: Target, row: int, proposed: Sequence[Proposed]
    ) -> Verdict:
        """The other rule's, behind `ids` [1, n]."""
        found = self._rule.verdict(ids, target, row, proposed)
        return found._replace(logprob=logprob(target.row(row)[0], found.token, self._count))


def logprob(logits: Tensor, token: int, count: int) -> Logprob:
    """Of a token, and of the `count` likeliest; logits [V]."""
    logs = logits.float().log_softmax(-1)
    best = logs.topk(min(count, logs.numel()))
    top = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return Logprob(token, float(logs[token]), tuple(top))
