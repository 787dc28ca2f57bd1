"""Acceptance rules: which drafts stay, and the token that verification itself gives.

Come in: target logits of the newest token's row and of each draft's row. Go out: verdicts, one
position at a time; the caller commits each token before it asks for the next, so that processors
always see the true prefix, and simply stops asking where the text ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor

from selfspec.decoding.drafters import Draft
from selfspec.decoding.scores import Sampler
from selfspec.decoding.sequence import DecodeState


class AcceptanceRule(Protocol):
    """Decides how many drafts stay."""

    lossless: bool

    def verdicts(
        self, state: DecodeState, target_logits: Tensor, draft: Draft
    ) -> Iterator[tuple[int, bool]]:
        """Token to commit, and whether it is the draft's; ends after the first that is not.

        `target_logits` [k + 1, V]: row j judges draft j, the last row gives the bonus token.
        """


class GreedyMatch:
    """A draft stays if it is the target's most likely token."""

    lossless = True

    def __init__(self, sampler: Sampler) -> None:
        """`sampler` must not sample."""
        self._sampler = sampler

    def verdicts(
        self, state: DecodeState, target_logits: Tensor, draft: Draft
    ) -> Iterator[tuple[int, bool]]:
        """Token to commit, and whether it is the draft's; ends after the first that is not."""
        if self._sampler.is_plain_greedy:
            choices = iter(target_logits.argmax(-1).tolist())  # one device read for all rows
        else:
            choices = (
                int(self._sampler.scores(state.ids, row).argmax(-1))
                for row in target_logits.split(1)
            )
        for drafted in [*draft.tokens, None]:
            token = next(choices)
            yield token, token == drafted
            if token != drafted:
                return


class SpeculativeSampling:
    """Draft x stays with probability p(x) / (q(x) * lenience), else a residual token replaces it.

    With lenience 1 the committed tokens have exactly the target's distribution (Leviathan et al.
    2023, section 2.3 and appendix A.1); below 1 more drafts stay and the distribution changes.
    Source: speculative_decoding_and_lenience.txt.
    """

    def __init__(self, sampler: Sampler, lenience: float = 1.0) -> None:
        """`sampler` must sample; `lenience` in (0, 1]."""
        self._sampler = sampler
        self._lenience = lenience
        self.lossless = lenience == 1.0

    def verdicts(
        self, state: DecodeState, target_logits: Tensor, draft: Draft
    ) -> Iterator[tuple[int, bool]]:
        """Token to commit, and whether it is the draft's; ends after the first that is not."""
        for index, token in enumerate(draft.tokens):
            target = self._sampler.probs(state.ids, target_logits[index : index + 1])
            law = _one_hot(target, token) if draft.probs is None else draft.probs[index]
            u = self._sampler.uniform(target.device)
            if bool(u * law[token] * self._lenience < target[token]):
                yield token, True
            else:
                yield self._sampler.draw(residual(target, law)), False
                return
        yield self._sampler.draw(self._sampler.probs(state.ids, target_logits[-1:])), False


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
