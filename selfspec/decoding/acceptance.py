"""Acceptance rules: which draft stays at a row, or the token that verification itself gives.

Come in: the target's logits of a row, and the drafts that follow it. Goes out: a verdict. The walk
along a draft is `decode.commit`'s; it commits each token before it asks for the next, so that
processors always see the true prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from selfspec import options as rules
from selfspec.decoding.sampling import Sampler
from selfspec.errors import InvalidOption
from selfspec.heads.heads import Ensemble, Signal, entropy


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


# --- how likely the model found each token, for who asked -----------------------------------------


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


# --- rules that change the output on purpose, labelled, never a default ---------------------------


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
