"""Drafts and acceptance rules, which accept one of a row's drafts or give verification's token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import starmap
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from selfspec import options as rules
from selfspec.config import SpeculationOptions
from selfspec.decoding.sampling import DraftToken, Sampler
from selfspec.decoding.stats import Ended
from selfspec.errors import InvalidOption
from selfspec.heads.heads import Ensemble, Signal, entropy
from selfspec.model.kv import depths

Proposed = Sequence[DraftToken]  # the drafts for one position, tried in order


@dataclass(kw_only=True)
class Draft:
    """k proposed tokens: a chain, or a tree in which each token follows its parent."""

    proposed: list[DraftToken] = field(default_factory=list)
    heads: int = 0  # times that heads were asked: for a token at a layer, or for a level of a tree
    ended: Ended = "off"
    target: Target | None = None  # set by verification: the newest token's row, then each draft's

    @classmethod
    def of(
        cls, tokens: Sequence[int], parents: Sequence[int] | None = None, *, ended: Ended = "off"
    ) -> Draft:
        """Make a draft of tokens that ran through no layer; no `parents`: a chain."""
        links = range(-1, len(tokens) - 1) if parents is None else parents
        return cls(proposed=[*starmap(DraftToken, zip(tokens, links, strict=True))], ended=ended)

    @property
    def tokens(self) -> list[int]:
        return [draft.token for draft in self.proposed]

    @property
    def parents(self) -> list[int]:
        return [draft.parent for draft in self.proposed]

    @property
    def trunk(self) -> int:
        """The length of the first path, on which each token follows the one before."""
        turns = (index for index, draft in enumerate(self.proposed) if draft.parent != index - 1)
        return next(turns, len(self.proposed))

    @property
    def is_chain(self) -> bool:
        return self.trunk == len(self.proposed)

    @property
    def depth(self) -> int:
        """The length of the longest path."""
        return 1 + max(depths(self.parents), default=-1)

    def path(self, index: int) -> list[int]:
        """Indices of the tokens from the root to token `index`, itself included; -1: none."""
        indices: list[int] = []
        while index >= 0:
            indices.append(index)
            index = self.proposed[index].parent
        return indices[::-1]

    def tokens_to(self, index: int) -> list[int]:
        return [self.proposed[at].token for at in self.path(index)]

    def children(self, row: int) -> list[int]:
        """Indices of the tokens after a row: 0 is the newest token's, i + 1 that of token i."""
        return [index for index, draft in enumerate(self.proposed) if draft.parent == row - 1]


class Verdict(NamedTuple):
    """The token to commit after a row."""

    token: int
    kept: int | None = None  # its index among the proposed tokens; None: it is none of them


class Target:
    """The target's logits, [T, V], for a round's k + 1 rows or for the rows of a whole batch."""

    def __init__(
        self,
        logits: Tensor,
        normed: Tensor | None = None,
        best: Callable[[], list[int]] | None = None,
    ) -> None:
        """`normed`, [T, d]: the unembedding's input. `best` replaces the argmax of `logits`."""
        self.logits, self.normed, self._best = logits, normed, best

    def row(self, index: int) -> Tensor:
        """Logits of one row, [1, V]."""
        return self.logits[index : index + 1]

    @cached_property
    def best(self) -> list[int]:
        """The most likely token of every row: one device read for the whole batch."""
        tokens: list[int] = self._best() if self._best else self.logits.max(-1).indices.tolist()
        return tokens

    def part(self, rows: slice) -> Target:
        normed = None if self.normed is None else self.normed[rows]
        return Target(self.logits[rows], normed, lambda: self.best[rows])


class Prefix(Protocol):
    """The text so far."""

    @property
    def ids(self) -> Tensor:
        """[1, n], made on access."""


class AcceptanceRule(Protocol):
    """Decides which drafts are accepted."""

    lossless: bool

    def verdict(self, text: Prefix, target: Target, row: int, proposed: Proposed) -> Verdict:
        """The token to commit after `text`, whose newest token is that of `row`."""


class ObservedRule:
    """Base of rules that wrap another rule and note each of its decisions."""

    def __init__(self, rule: AcceptanceRule) -> None:
        self._rule, self.lossless = rule, rule.lossless

    def verdict(self, text: Prefix, target: Target, row: int, proposed: Proposed) -> Verdict:
        verdict = self._rule.verdict(text, target, row, proposed)
        self.note(target.logits[row], verdict.token)
        return verdict

    def note(self, logits: Tensor, token: int) -> None:
        """Note a token that was committed from these logits, [V]."""
        raise NotImplementedError


class GreedyMatch:
    """Accepts a draft if it is the target's own choice: its most likely token, or its seeded draw.

    With a seed the text equals that of plain sampling with this seed. A draft drawn from q equals
    the target's draw from p with a probability of at least (1 - TV) / (1 + TV), where TV is their
    total variation distance: both draws take the winner of one race, [V] arrival times divided by
    probabilities (Daliri, Musco and Suresh 2024, "Coupling without Communication and
    Drafter-Invariant Speculative Decoding").
    """

    lossless = True

    def __init__(self, sampler: Sampler) -> None:
        """`sampler` must be greedy or have a seed."""
        self._sampler = sampler

    def verdict(self, text: Prefix, target: Target, row: int, proposed: Proposed) -> Verdict:
        if self._sampler.is_plain_greedy:
            token = target.best[row]
        else:
            token = self._sampler.choose(text.ids, target.row(row)).token
        tokens = [draft.token for draft in proposed]
        return Verdict(token, tokens.index(token) if token in tokens else None)


class SpeculativeSampling:
    """Accepts draft x with probability p(x) / (q(x) * lenience), else draws a residual token.

    With lenience 1 the committed tokens have exactly the target's distribution (Leviathan et al.
    2023, section 2.3 and appendix A.1); below 1 more drafts are accepted, which changes it.
    Source: speculative_decoding_and_lenience.txt.
    """

    def __init__(self, sampler: Sampler, lenience: float = 1.0) -> None:
        """`sampler` must sample; `lenience` in (0, 1]."""
        self._sampler = sampler
        self._lenience = lenience
        self.lossless = lenience == 1.0

    def verdict(self, text: Prefix, target: Target, row: int, proposed: Proposed) -> Verdict:
        probs = self._sampler.probs(text.ids, target.row(row))
        for index, draft in enumerate(proposed):
            if (draft_probs := draft.probs) is None:  # a deterministic draft: one-hot
                draft_probs = torch.zeros_like(probs)
                draft_probs[draft.token] = 1.0
            u = self._sampler.uniform(probs.device)
            if bool(u * draft_probs[draft.token] * self._lenience < probs[draft.token]):
                return Verdict(draft.token, index)
            probs = residual(probs, draft_probs)
        return Verdict(self._sampler.draw(probs))


def residual(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """Resampling distribution after a rejection, norm(max(0, p - q)): [V], [V] -> [V].

    It is p itself where rounding leaves nothing, because p and q are equal up to the last bits. The
    probability of such a rejection is near the rounding error.
    """
    rest = (target_probs - draft_probs).clamp_(min=0.0)
    total = rest.sum()
    return rest / total if total > 0 else target_probs


# --- log-probabilities of committed tokens, on request


class Logprob(NamedTuple):
    """A token's log-probability by the model's own logits; natural logarithm."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # likeliest tokens at its position, log-probs descending


class LogprobRule(ObservedRule):
    """Notes log-probabilities of a rule's tokens before all processors, as vLLM does by default."""

    def __init__(self, rule: AcceptanceRule, count: int, entries: list[Logprob]) -> None:
        super().__init__(rule)
        self._count, self._entries = count, entries

    def note(self, logits: Tensor, token: int) -> None:
        logprobs = logits.float().log_softmax(-1)
        best = logprobs.topk(min(self._count, len(logprobs)))
        top = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        self._entries.append(Logprob(token, float(logprobs[token]), tuple(top)))


# --- lossy rules, which change the output on purpose: labelled, never a default


class CmAsd:
    """CM-ASD's verification, section III-B (c): accepts a draft close to the target's best.

    | document | here |
    |---|---|
    | y-hat, the drafted token | `token` |
    | y(1), y(beta): the target's best and its beta-th best | the first and last of `best` |
    | log P(y-hat) >= log P(y(beta)) | `top_beta` |
    | log P(y(1)) - log P(y-hat) <= tau | `tolerance`, in nats |
    | tau = tau_base + gamma (1 - C) | options `tolerance`, `tolerance_gain`; reading "paper" |
    | C, the drafter's confidence | `_signal` of its belief; 1 where there is none |

    The document says that low confidence is to be judged more strictly, but its formula does the
    opposite. Reading "intent" follows the text: tau = tau_base + gamma C. A rejected draft is
    replaced by the target's own choice: its best token, or, with sampling (which the document does
    not cover), a draw from its distribution.
    """

    lossless = False

    def __init__(self, sampler: Sampler, settings: rules.CmAsd) -> None:
        self._sampler, self._settings = sampler, settings
        self._signal: Signal = Ensemble(settings.weights, settings.margin_scale)

    def verdict(self, text: Prefix, target: Target, row: int, proposed: Proposed) -> Verdict:
        options, scores = self._settings, self._sampler.scores(text.ids, target.row(row))[0]
        best = scores.topk(min(options.top_beta, len(scores))).values
        for index, draft in enumerate(proposed):
            confidence = 1.0 if draft.belief is None else float(self._signal(draft.belief.log()))
            factor = confidence if options.reading == "intent" else 1.0 - confidence
            tolerance = options.tolerance + options.tolerance_gain * factor
            score = scores[draft.token]
            # differences of scores are those of log-probabilities
            if bool((score >= best[-1]) & (best[0] - score <= tolerance)):
                return Verdict(draft.token, index)
        return Verdict(target_choice(self._sampler, scores))


class Easd:
    """EASD: rules out the draft's token where both models are unsure between the same tokens.

    | document | here |
    |---|---|
    | P_d, P_t | the draft's belief, the target's distribution, both after the processors |
    | H_d > tau_H and H_t > tau_H, in nats | `entropy` |
    | overlap of the best n, above tau_O | `tokens`, `overlap` |
    | P_t(c) = 0, renormalised | the score of the token set to -inf |
    | accepted with min(1, P_t(c) / P_d(c)) | the same |
    | a rejected draft is replaced by a draw from P_t itself | the same: not from the residual |

    Source: sections 3.4 to 3.6, algorithm 1. It prints ">" for the overlap, so that with 0.8 and
    n = 5 all five must be shared; its text speaks of four, which is a tau_O of 0.6 to below 0.8.
    Greedy: P_t and P_d are read as one-hot after the penalty. A draft is accepted if it is the best
    token and not ruled out; otherwise the best of the other tokens is taken.
    """

    lossless = False

    def __init__(self, sampler: Sampler, settings: rules.Easd) -> None:
        if settings.entropy is None:
            raise InvalidOption(
                "acceptance easd needs an entropy threshold for this model. Run: selfspec "
                "calibrate --entropy --data FILE, or give --acceptance easd:entropy=.."
            )
        self._sampler, self._tokens, self._entropy = sampler, settings.tokens, settings.entropy
        self._least_common = settings.overlap * settings.tokens

    def verdict(self, text: Prefix, target: Target, row: int, proposed: Proposed) -> Verdict:
        scores = self._sampler.scores(text.ids, target.row(row))[0]
        for index, draft in enumerate(proposed):
            if draft.belief is not None and self._ambiguous(scores, draft.belief):
                ruled_out = scores.new_tensor([draft.token], dtype=torch.long)
                scores = scores.index_fill(0, ruled_out, -torch.inf)
            if self._accepts(scores, draft):
                return Verdict(draft.token, index)
        return Verdict(target_choice(self._sampler, scores))

    def _ambiguous(self, scores: Tensor, belief: Tensor) -> bool:
        """Whether both distributions [V] are flat and share their best tokens; one device read."""
        target = scores.softmax(-1)
        count = min(self._tokens, len(target))
        target_tokens, draft_tokens = target.topk(count).indices, belief.topk(count).indices
        common = torch.isin(target_tokens, draft_tokens).sum()
        flat = torch.minimum(entropy(target), entropy(belief)) > self._entropy
        return bool(flat & (common > self._least_common))

    def _accepts(self, scores: Tensor, draft: DraftToken) -> bool:
        if not self._sampler.do_sample:
            return int(scores.argmax(-1)) == draft.token
        # a deterministic draft has a one-hot distribution
        draft_prob = 1.0 if draft.probs is None else draft.probs[draft.token]
        u = self._sampler.uniform(scores.device)
        return bool(u * draft_prob < scores.softmax(-1)[draft.token])


def target_choice(sampler: Sampler, scores: Tensor) -> int:
    """The target's own choice from processed scores [V]: the best, or a draw."""
    return sampler.draw(scores.softmax(-1)) if sampler.do_sample else int(scores.argmax(-1))


def acceptance_rule(sampler: Sampler, options: SpeculationOptions) -> AcceptanceRule:
    """The rule for `options`; plain decoding is lossless whichever rule they name."""
    acceptance = options.acceptance if options.speculate else rules.Lossless()
    if isinstance(acceptance, rules.CmAsd):
        return CmAsd(sampler, acceptance)
    if isinstance(acceptance, rules.Easd):
        return Easd(sampler, acceptance)
    lenience = acceptance.lenience if isinstance(acceptance, rules.Lenient) else 1.0
    if sampler.do_sample and sampler.seed is None:
        return SpeculativeSampling(sampler, lenience)
    if lenience < 1.0 and not sampler.do_sample:
        raise InvalidOption(
            "lenience below 1 needs do_sample: greedy drafts match or do not. Leave one out"
        )
    return GreedyMatch(sampler)
