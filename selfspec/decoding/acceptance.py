"""Acceptance rules: which draft stays at a row, or the token that verification itself gives.

Come in: the target's logits of a row, and the drafts that follow it. Goes out: a verdict. The walk
along a draft is `decode.commit`'s; it commits each token before it asks for the next, so that
processors always see the true prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple, Protocol

from torch import Tensor

from selfspec.decoding.scores import Sampler


class Proposed(NamedTuple):
    """A draft token, and what its drafter knows of it."""

    token: int
    law: Tensor | None = None
    """[V] it was drawn from; None: it was certain."""
    belief: Tensor | None = None
    """[V] that the drafter thought of this place; None: it has none."""


class Verdict(NamedTuple):
    """What to commit behind a row."""

    token: int
    kept: int | None = None
    """Which of the proposed tokens it is; None: none of them."""


class Together:
    """The target's logits of many texts' rows."""

    def __init__(self, logits: Tensor) -> None:
        """[T, V]."""
        self._logits = logits

    @cached_property
    def best(self) -> list[int]:
        """The most likely token of every row: one device read for all."""
        best: list[int] = self._logits.argmax(-1).tolist()
        return best

    def part(self, rows: slice) -> Target:
        """Those of one text."""
        return Target(self._logits[rows], lambda: self.best[rows])


class Target:
    """The target's logits of a round's rows, [k + 1, V]."""

    def __init__(self, logits: Tensor, best: Callable[[], list[int]] | None = None) -> None:
        """`best`: reads the most likely token of every row."""
        self.logits = logits
        self._best = best

    def row(self, index: int) -> Tensor:
        """Logits of one row, [1, V]."""
        return self.logits[index : index + 1]

    @cached_property
    def best(self) -> list[int]:
        """The most likely token of every row."""
        return Together(self.logits).best if self._best is None else self._best()


class AcceptanceRule(Protocol):
    """Decides which drafts stay."""

    lossless: bool

    def verdict(
        self, ids: Tensor, target: Target, row: int, proposed: Sequence[Proposed]
    ) -> Verdict:
        """The token behind `ids` [1, n], the text up to `row`; `proposed` are tried in order."""


class GreedyMatch:
    """A draft stays if it is the target's most likely token."""

    lossless = True

    def __init__(self, sampler: Sampler) -> None:
        """`sampler` must not sample."""
        self._sampler = sampler

    def verdict(
        self, ids: Tensor, target: Target, row: int, proposed: Sequence[Proposed]
    ) -> Verdict:
        """The token behind `ids` [1, n], the text up to `row`; `proposed` are tried in order."""
        if self._sampler.is_plain_greedy:
            token = target.best[row]
        else:
            token = int(self._sampler.scores(ids, target.row(row)).argmax(-1))
        return _match(token, proposed)


class SeededMatch:
    """A draft stays if it is the token that the target draws by itself.

    Draws are tied to a seed and a position, so the text is that of plain sampling with this seed,
    whatever the drafts were. A draft that was drawn from q at its position is the target's draw
    from p with a probability of at least (1 - TV) / (1 + TV), TV being their total variation: both
    take the winner of one race, [V] arrival times divided by probabilities (Daliri, Musco and
    Suresh 2024, "Coupling without Communication and Drafter-Invariant Speculative Decoding").
    """

    lossless = True

    def __init__(self, sampler: Sampler) -> None:
        """`sampler` must sample, with a seed."""
        self._sampler = sampler

    def verdict(
        self, ids: Tensor, target: Target, row: int, proposed: Sequence[Proposed]
    ) -> Verdict:
        """The token behind `ids` [1, n], the text up to `row`; `proposed` are tried in order."""
        return _match(self._sampler.choose(ids, target.row(row)).token, proposed)


class SpeculativeSampling:
    """Draft x stays with probability p(x) / (q(x) * lenience), else a residual token replaces it.

    With lenience 1 the committed tokens have exactly the target's distribution (Leviathan et al.
    2023, section 2.3 and appendix A.1); below 1 more drafts stay and the distribution changes.
    Siblings are tried one after another, each against what the ones before it left of p, which
    keeps that distribution if they were drawn independently.
    Source: speculative_decoding_and_lenience.txt.
    """

    def __init__(self, sampler: Sampler, lenience: float = 1.0) -> None:
        """`sampler` must sample; `lenience` in (0, 1]."""
        self._sampler = sampler
        self._lenience = lenience
        self.lossless = lenience == 1.0

    def verdict(
        self, ids: Tensor, target: Target, row: int, proposed: Sequence[Proposed]
    ) -> Verdict:
        """The token behind `ids` [1, n], the text up to `row`; `proposed` are tried in order."""
        probs = self._sampler.probs(ids, target.row(row))
        for index, (token, law, _) in enumerate(proposed):
            law = _one_hot(probs, token) if law is None else law
            u = self._sampler.uniform(probs.device)
            if bool(u * law[token] * self._lenience < probs[token]):
                return Verdict(token, index)
            probs = residual(probs, law)
        return Verdict(self._sampler.draw(probs))


def _match(token: int, proposed: Sequence[Proposed]) -> Verdict:
    """The target's own token, and which draft it is."""
    tokens = [draft.token for draft in proposed]
    return Verdict(token, tokens.index(token) if token in tokens else None)


def residual(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """Resampling distribution after a rejection, norm(max(0, p - q)): [V], [V] -> [V].

    Where rounding left nothing (p and q equal to the last bits) it is p itself: such a rejection
    has a probability near the rounding error, and p is the law it would be drawn from anyway.
    """
    rest = (target_probs - draft_probs).clamp_(min=0.0)
    total = rest.sum()
    return rest / total if total > 0 else target_probs


def _one_hot(like: Tensor, token: int) -> Tensor:
    """The law of a draft that was certain."""
    law = like.new_zeros(like.shape)
    law[token] = 1.0
    return law
