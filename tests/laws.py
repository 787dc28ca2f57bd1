"""Exact distributions of committed tokens under acceptance rules, for tests of decoding."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList

from selfspec.decoding.acceptance import AcceptanceRule, Draft, Target
from selfspec.decoding.decode import walk
from selfspec.decoding.sampling import DraftToken, Sampler
from selfspec.decoding.state import DecodeState

Law = dict[tuple[int, ...], float]

TARGET = torch.tensor([3, 6, 1, 2, 4]) / 16
DRAFT = torch.tensor([8, 4, 2, 2, 0]) / 16
TARGETS = torch.stack([TARGET.roll(shift) for shift in range(5)])  # [last token, next token]
DRAFTS = torch.stack([DRAFT.roll(2 * shift) for shift in range(5)])


class Text(DecodeState):
    """The part of a decode state that rules, and drafters without layers, read."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    @property
    def ids(self) -> Tensor:
        return torch.tensor([self.tokens])

    def committed(self, start: int) -> list[int]:
        return self.tokens[start:]


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


class Share:
    """Stands in for a uniform number: comparisons are true with the exact probability."""

    def __init__(self, dice: Dice, scale: float = 1.0) -> None:
        self.dice, self.scale = dice, scale

    def __mul__(self, other: Any) -> Share:
        return Share(self.dice, self.scale * float(other))

    def __lt__(self, bound: Any) -> bool:
        chance = min(1.0, float(bound) / self.scale) if self.scale > 0.0 else 1.0
        return self.dice.roll([1.0 - chance, chance]) == 1


class LoadedSampler(Sampler):
    """A Sampler whose draws, and comparisons of its uniform numbers, are rolled by `dice`."""

    dice: Dice

    def draw(self, probs: Tensor, place: int | None = None, tokens: Tensor | None = None) -> int:
        assert not probs.isnan().any()
        return self.dice.roll(probs.tolist())

    def uniform(self, device: torch.device) -> Any:
        return Share(self.dice)


def loaded(*processors: Any) -> LoadedSampler:
    return LoadedSampler(LogitsProcessorList(processors), do_sample=True)


def enumerate_law(sampler: LoadedSampler, play: Callable[[], tuple[int, ...]]) -> Law:
    """The exact distribution of what `play` returns: every outcome of every draw is played."""
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
    rule: AcceptanceRule, text: Text, logits: Tensor, draft: Draft
) -> list[tuple[int, bool]]:
    """All verdicts; each token is committed before the next verdict, as in decode."""
    pairs = []
    for _, verdict in walk(text, draft, Target(logits), rule):
        text.tokens.append(verdict.token)
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


def drafted(token: int, law: Tensor) -> Draft:
    """One token drawn from `law`, which is its drafter's belief."""
    return Draft(proposed=[DraftToken(token, probs=law, belief=law)])


def completed(rounds: Law, length: int) -> Law:
    """The distribution of whole sequences after token 0, completed by draws from the target."""
    law: dict[tuple[int, ...], float] = defaultdict(float)
    for start, weight in rounds.items():
        for rest in product(range(5), repeat=length - len(start)):
            law[start + rest] += weight * chance((start[-1:] or (0,)) + rest)
    return law


def chance(tokens: Sequence[int]) -> float:
    """Probability of tokens[1:] given tokens[0] under the target."""
    return math.prod(float(TARGETS[a, b]) for a, b in pairwise(tokens))


def plain(length: int) -> Law:
    """The distribution of sequences of plain sampling after token 0."""
    return {s: chance((0, *s)) for s in product(range(5), repeat=length)}


def assert_same(found: Law, expected: Law) -> None:
    # float32 probabilities; largest difference measured over all tests: 6e-8
    for sequence in found.keys() | expected.keys():
        assert found.get(sequence, 0.0) == pytest.approx(expected.get(sequence, 0.0), abs=2e-7)
