"""Exact distributions of committed tokens under acceptance rules; used by test_acceptance.py."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise, product
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList

from selfspec.decoding.acceptance import AcceptanceRule, Draft, Target
from selfspec.decoding.decode import walk
from selfspec.decoding.sampling import DraftToken, Sampler
from selfspec.decoding.state import DecodeState

CELLS = 8
Law = dict[tuple[int, ...], float]

TARGET = torch.tensor([3, 6, 1, 2, 4]) / 16
DRAFT = torch.tensor([8, 4, 2, 2, 0]) / 16
TARGETS = torch.stack([TARGET.roll(shift) for shift in range(5)])  # [last token, next token]
DRAFTS = torch.stack([DRAFT.roll(2 * shift) for shift in range(5)])


class Words:
    """Stands in for DecodeState: committed ids only."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = list(tokens)

    @property
    def ids(self) -> Tensor:
        return torch.tensor([self.tokens])


class Dice:
    """Plays a script of outcomes, then the first outcome of everything; notes the alternatives."""

    def __init__(self, script: Sequence[int]) -> None:
        self.script = script
        self.played: list[int] = []
        self.others: list[list[int]] = []
        self.weight = 1.0

    def roll(self, weights: Sequence[float]) -> int:
        possible = [index for index, weight in enumerate(weights) if weight > 0]
        step = len(self.played)
        choice = self.script[step] if step < len(self.script) else possible[0]
        if step >= len(self.script):
            self.others += [[*self.played, other] for other in possible[1:]]
        self.played.append(choice)
        self.weight *= weights[choice]
        return choice


class LoadedSampler(Sampler):
    """A Sampler whose draws are rolled by `dice`."""

    dice: Dice

    def draw(self, probs: Tensor, place: int | None = None) -> int:
        assert not probs.isnan().any()
        return self.dice.roll(probs.tolist())

    def uniform(self, device: torch.device) -> Tensor:
        return torch.tensor((self.dice.roll([1 / CELLS] * CELLS) + 0.5) / CELLS)


class FixedSampler(Sampler):
    """A Sampler whose uniform numbers are all `u`."""

    u: float

    def uniform(self, device: torch.device) -> Tensor:
        return torch.tensor(self.u)


def make_sampler(kind: type[Sampler], *processors: Any, do_sample: bool = True) -> Any:
    return kind(LogitsProcessorList(processors), do_sample)


def enumerate_law(sampler: LoadedSampler, play: Callable[[], tuple[int, ...]]) -> Law:
    """The exact distribution of what `play` returns: every outcome of every draw is played.

    Uniform numbers take the centres of 8 equal cells, which is exact as long as all acceptance
    probabilities are multiples of 1/8; so drafts here have powers of two as probabilities,
    targets sixteenths.
    """
    law: dict[tuple[int, ...], float] = defaultdict(float)
    scripts: list[list[int]] = [[]]
    while scripts:
        dice = Dice(scripts.pop())
        object.__setattr__(sampler, "dice", dice)  # Sampler is frozen
        law[play()] += dice.weight
        scripts += dice.others
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-6)
    return dict(law)


def verdicts(
    rule: AcceptanceRule, words: Words, logits: Tensor, draft: Draft
) -> list[tuple[int, bool]]:
    """All verdicts; each token is committed before the next verdict, as in decode."""
    pairs = []
    for _, verdict in walk(cast(DecodeState, words), draft, Target(logits), rule):
        words.tokens.append(verdict.token)
        pairs.append((verdict.token, verdict.kept is not None))
    return pairs


def draft_words(sampler: Sampler, count: int, law: Tensor = DRAFTS) -> Draft:
    """`count` tokens, each drawn from `law` given the one before, the first given 0."""
    draft, last = Draft(), 0
    for place in range(count):
        token = sampler.draw(law[last])
        draft.proposed.append(DraftToken(token, place - 1, probs=law[last]))
        last = token
    return draft


def drafted(*tokens: int, law: Tensor, belief: Tensor | None = None) -> Draft:
    """A chain of tokens, each drawn from `law`."""
    draft = Draft.of(tokens)
    draft.proposed = [token._replace(probs=law, belief=belief) for token in draft.proposed]
    return draft


def one_round(rule: AcceptanceRule, sampler: Sampler, count: int) -> tuple[int, ...]:
    """Tokens that a round commits after token 0, by the tables TARGETS and DRAFTS."""
    words, draft = Words(0), draft_words(sampler, count)
    verdicts(rule, words, TARGETS[[0, *draft.tokens]].log(), draft)
    return tuple(words.tokens[1:])


def completed(rounds: Law, length: int, targets: Tensor = TARGETS) -> Law:
    """The distribution of whole sequences after token 0, completed by draws from the target."""
    law: dict[tuple[int, ...], float] = defaultdict(float)
    for start, weight in rounds.items():
        for rest in product(range(len(targets)), repeat=length - len(start)):
            law[start + rest] += weight * chance((start[-1:] or (0,)) + rest, targets)
    return law


def chance(tokens: Sequence[int], targets: Tensor = TARGETS) -> float:
    """Probability of tokens[1:] given tokens[0] under the target."""
    return math.prod(float(targets[a, b]) for a, b in pairwise(tokens))


def plain(length: int, targets: Tensor = TARGETS) -> Law:
    """The distribution of sequences of plain sampling after token 0."""
    return {s: chance((0, *s), targets) for s in product(range(len(targets)), repeat=length)}


def assert_same(found: Law, expected: Law) -> None:
    # float32 probabilities; largest difference measured over all tests: 6e-8
    for sequence in found.keys() | expected.keys():
        assert found.get(sequence, 0.0) == pytest.approx(expected.get(sequence, 0.0), abs=2e-7)
