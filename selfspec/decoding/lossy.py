"""Acceptance rules that change the output on purpose: CM-ASD and EASD.

They say `lossless = False`, are never a default, and every result made with them is labelled. What
they ask of the drafter is its belief, the whole law of each draft token; text copied by an n-gram
drafter has none and counts as certain.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from selfspec.decoding.acceptance import Proposed, Target, Verdict
from selfspec.decoding.scores import Sampler
from selfspec.errors import InvalidOption
from selfspec.heads.confidence import Ensemble, Signal, entropy
from selfspec.options import rules


class CmAsd:
    """CM-ASD's verification, section III-B (c): a draft stays if it is close to the target's best.

    | document | here |
    |---|---|
    | y-hat, the drafted token | `token` |
    | y(1), y(beta): the target's best and its beta-th best | the first and last of `best` |
    | log P(y-hat) >= log P(y(beta)) | `top_beta` |
    | log P(y(1)) - log P(y-hat) <= tau | `_tolerance`, in nats |
    | tau = tau_base + gamma (1 - C) | `tolerance`, `tolerance_gain`; reading "paper" |
    | C, the drafter's confidence | `signal` of its belief; 1 where there is none |

    The document says that low confidence is to be judged more strictly, and its formula does the
    opposite. Reading "intent" is what it says: tau = tau_base + gamma C. In place of a refused
    draft comes the target's own choice: its best, or where it samples (in the document it never
    does) a draw from its law.
    """

    lossless = False

    def __init__(
        self,
        sampler: Sampler,
        signal: Signal,
        *,
        reading: str,
        top_beta: int,
        tolerance: float,
        tolerance_gain: float,
    ) -> None:
        """`signal` maps logarithms of a belief [V] to [0, 1]; `reading` is intent or paper."""
        self._sampler = sampler
        self._signal = signal
        self._reading = reading
        self._top_beta = top_beta
        self._base = tolerance
        self._gain = tolerance_gain

    def verdict(
        self, ids: Tensor, target: Target, row: int, proposed: Sequence[Proposed]
    ) -> Verdict:
        """The token behind `ids` [1, n], the text up to `row`; `proposed` are tried in order."""
        scores = self._sampler.scores(ids, target.row(row))[0]
        for index, draft in enumerate(proposed):
            if self._close(scores, draft.token, self._tolerance(draft)):
                return Verdict(draft.token, index)
        return Verdict(chosen(self._sampler, scores))

    def _close(self, scores: Tensor, token: int, tolerance: float) -> bool:
        """Both conditions, on [V]: differences of scores are those of log-probabilities."""
        best = scores.topk(min(self._top_beta, len(scores))).values
        near = (scores[token] >= best[-1]) & (best[0] - scores[token] <= tolerance)
        return bool(near)

    def _tolerance(self, draft: Proposed) -> float:
        sure = 1.0 if draft.belief is None else float(self._signal(draft.belief.log()))
        return self._base + self._gain * (sure if self._reading == "intent" else 1.0 - sure)


class Easd:
    """EASD: where both models waver between the same tokens, the draft's token is ruled out.

    | document | here |
    |---|---|
    | P_d, P_t | the draft's belief, the target's law, both after the processors |
    | H_d > tau_H and H_t > tau_H, in nats | `entropy_threshold` |
    | overlap of the best n, above tau_O | `overlap_tokens`, `overlap_threshold` |
    | P_t(c) = 0, renormalised | the score of the token set to -inf |
    | accepted with min(1, P_t(c) / P_d(c)) | here too |
    | a refused draft is replaced by a draw from P_t itself | here too: not from the residual |

    Source: sections 3.4 to 3.6, algorithm 1. It prints ">" for the overlap, so that with 0.8 and
    n = 5 all five must be shared; its text speaks of four, which is a tau_O of 0.6 to below 0.8.
    Greedy: P_t and P_d are read as one-hot after the penalty. A draft stays if it is the best token
    and not ruled out; else the best of the others is taken.
    """

    lossless = False

    def __init__(
        self,
        sampler: Sampler,
        *,
        entropy_threshold: float,
        overlap_threshold: float,
        overlap_tokens: int,
    ) -> None:
        self._sampler = sampler
        self._entropy_threshold = entropy_threshold
        self._least_common = overlap_threshold * overlap_tokens
        self._overlap_tokens = overlap_tokens

    def verdict(
        self, ids: Tensor, target: Target, row: int, proposed: Sequence[Proposed]
    ) -> Verdict:
        """The token behind `ids` [1, n], the text up to `row`; `proposed` are tried in order."""
        scores = self._sampler.scores(ids, target.row(row))[0]
        for index, draft in enumerate(proposed):
            if draft.belief is not None and self._ambiguous(scores, draft.belief):
                ruled_out = scores.new_tensor([draft.token], dtype=torch.long)
                scores = scores.index_fill(0, ruled_out, -torch.inf)
            if self._stays(scores, draft):
                return Verdict(draft.token, index)
        return Verdict(chosen(self._sampler, scores))

    def _ambiguous(self, scores: Tensor, belief: Tensor) -> bool:
        """Whether both laws [V] are flat and agree on their best tokens; one device read."""
        target = scores.softmax(-1)
        count = min(self._overlap_tokens, len(target))
        ours, theirs = target.topk(count).indices, belief.topk(count).indices
        common = torch.isin(ours, theirs).sum()
        flat = torch.minimum(entropy(target), entropy(belief)) > self._entropy_threshold
        return bool(flat & (common > self._least_common))

    def _stays(self, scores: Tensor, draft: Proposed) -> bool:
        if not self._sampler.do_sample:
            return int(scores.argmax(-1)) == draft.token
        # a draft that was certain has the law one-hot
        drafted = 1.0 if draft.law is None else draft.law[draft.token]
        u = self._sampler.uniform(scores.device)
        return bool(u * drafted < scores.softmax(-1)[draft.token])


def chosen(sampler: Sampler, scores: Tensor) -> int:
    """The target's own choice from processed scores [V]: the best, or a draw."""
    return sampler.draw(scores.softmax(-1)) if sampler.do_sample else int(scores.argmax(-1))


def _cm_asd(sampler: Sampler, wanted: rules.CmAsd) -> CmAsd:
    return CmAsd(
        sampler,
        Ensemble(wanted.weights, wanted.margin_scale),
        reading=wanted.reading,
        top_beta=wanted.top_beta,
        tolerance=wanted.tolerance,
        tolerance_gain=wanted.tolerance_gain,
    )


def _easd(sampler: Sampler, wanted: rules.Easd) -> Easd:
    if wanted.entropy is None:
        raise InvalidOption(
            "acceptance easd needs an entropy threshold for this model. Run: selfspec calibrate "
            "--entropy --data FILE, or give --acceptance easd:entropy=.."
        )
    return Easd(
        sampler,
        entropy_threshold=wanted.entropy,
        overlap_threshold=wanted.overlap,
        overlap_tokens=wanted.tokens,
    )


def lossy_rule(sampler: Sampler, wanted: rules.CmAsd | rules.Easd) -> CmAsd | Easd:
    """The rule of these settings. Raises InvalidOption for EASD without an entropy threshold."""
    return _easd(sampler, wanted) if isinstance(wanted, rules.Easd) else _cm_asd(sampler, wanted)
