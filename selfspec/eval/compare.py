"""What the losslessness ladder compares: bits of logits, texts, and distances to the best token.

Comes in: prompts, and Speculators to decode them with. Goes out: counts, first differing places,
margins and measured noise; what they prove is for `lossless` to say.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from selfspec.api.request import Request
from selfspec.api.speculator import Speculator
from selfspec.eval.decoding import decode, planted
from selfspec.eval.quality import first_divergence
from selfspec.eval.reference import block_logits, hugging_face


@dataclass(frozen=True, kw_only=True)
class Case:
    """One prompt, ready to be decoded."""

    id: str
    request: Request

    @property
    def ids(self) -> Tensor:
        """Of the prompt, [1, P]."""
        return self.request.input_ids

    @property
    def new_tokens(self) -> int:
        """At most."""
        return self.request.only().stop.max_length - self.ids.shape[1]

    def scores(self, tokens: Sequence[int], logits: Tensor) -> Tensor:
        """Logits [n, V] of `tokens` behind the prompt -> the scores that a greedy choice is by."""
        sampler = self.request.sampler
        if sampler.is_plain_greedy:
            return logits
        ids = torch.cat([self.ids, self.ids.new_tensor([list(tokens)])], dim=1)
        rows = enumerate(logits.split(1), start=self.ids.shape[1])
        return torch.cat([sampler.scores(ids[:, :end], row.clone()) for end, row in rows])


@dataclass
class Bits:
    """Logits compared bit by bit."""

    positions: int = 0
    differing: int = 0
    """Positions with any bit that differs."""
    first: str = ""
    """The first such position, and how much."""

    def compare(self, where: str, found: Tensor, expected: Tensor) -> None:
        """[n, V] and [n, V], float32."""
        # as integers, so that a NaN equals itself and zeros have a sign
        unequal = found.contiguous().view(torch.int32) != expected.contiguous().view(torch.int32)
        rows = unequal.any(-1)
        self.positions += len(rows)
        self.differing += int(rows.sum())
        if not self.first and bool(rows.any()):
            place = int(rows.int().argmax())
            size = float((found[place] - expected[place]).abs().max())
            self.first = (
                f"{where}, position {place + 1}: {int(unequal[place].sum()):,} of "
                f"{found.shape[-1]:,} logits, by up to {size:.3g}"
            )


@dataclass(frozen=True, kw_only=True)
class Parting:
    """The first place where a text is not Hugging Face's."""

    case: str
    drafts: str
    position: int
    """Which new token, from 1."""
    margin: float
    """By how much Hugging Face's own scores prefer its token to ours."""

    def __str__(self) -> str:
        """For people."""
        return f"{self.case} with {self.drafts} drafts, new token {self.position}"


@dataclass
class Comparison:
    """Our texts, with drafts of several kinds, beside Hugging Face's."""

    texts: list[list[list[int]]] = field(default_factory=list)
    """By prompt and kind of drafts."""
    partings: list[Parting] = field(default_factory=list)
    noise: float = 0.0
    """Largest difference of Hugging Face's scores between one row at a time and one block of all
    rows, over its own texts. No code of ours is in it, so no bug of ours can hide in it."""

    @property
    def count(self) -> int:
        """Texts of ours."""
        return sum(map(len, self.texts))

    @property
    def equal(self) -> str:
        """For people."""
        return f"{self.count - len(self.partings)} of {self.count} texts equal"


@dataclass(frozen=True)
class Shortfall:
    """How far the tokens of a text lie below the best ones."""

    below: float
    """Largest distance of a token's score to the top, in the exact model."""
    noise: float
    """Largest difference of any score between the exact model and the one that was run."""

    @property
    def excess(self) -> float:
        """What noise cannot explain; two scores may lose it."""
        return self.below - 2 * self.noise


def compare_texts(
    speculator: Speculator,
    cases: Sequence[Case],
    tick: Callable[[], None],
    only: Collection[str] | None = None,
) -> Comparison:
    """Texts with all kinds of drafts, or `only` some, not pinned, and Hugging Face's.

    Noise is measured where partings are to be judged by it: not for a selection of kinds.
    """
    compared = Comparison()
    options = replace(speculator.options, pinned=False)
    for case in cases:
        theirs, logits = hugging_face(speculator.model, case.ids, case.new_tokens)
        scores = case.scores(theirs, logits)
        if only is None:
            block = case.scores(theirs, block_logits(speculator.model, case.ids, theirs))
            compared.noise = max(compared.noise, largest_difference(scores, block))
        compared.texts.append([])
        kinds = planted(speculator, options, case.ids[0].tolist() + theirs)
        for name, (drafter, adapted) in kinds.items():
            if only is not None and name not in only:
                continue
            ours = decode(speculator, case.request, adapted, drafter).tokens
            compared.texts[-1].append(ours)
            if (at := first_divergence(ours, theirs)) is not None:
                distance = margin(scores, theirs, ours, at)
                compared.partings.append(
                    Parting(case=case.id, drafts=name, position=at + 1, margin=distance)
                )
        tick()
    return compared


def margin(scores: Tensor, theirs: Sequence[int], ours: Sequence[int], at: int) -> float:
    """By how much `scores` [n, V] prefer their token `at` to ours.

    Where one text just ends: the whole range of scores, for no noise explains that.
    """
    if at >= min(len(theirs), len(ours)):
        finite = scores[scores.isfinite()]
        return float(finite.max() - finite.min())
    return float(scores[at, theirs[at]] - scores[at, ours[at]])


def shortfall(
    case: Case, tokens: Sequence[int], exact: PreTrainedModel, run: PreTrainedModel
) -> Shortfall:
    """Of `tokens` behind the prompt, both models reading them in one block."""
    best = case.scores(tokens, block_logits(exact, case.ids, tokens))
    rounded = case.scores(tokens, block_logits(run, case.ids, tokens))
    chosen = best.gather(1, torch.tensor([list(tokens)], device=best.device).T)[:, 0]
    below = float((best.amax(-1) - chosen).max())
    return Shortfall(below, largest_difference(rounded, best))


def largest_difference(found: Tensor, expected: Tensor) -> float:
    """Over all scores that are finite in both."""
    difference = (found - expected).abs()
    return float(difference[difference.isfinite()].max())
