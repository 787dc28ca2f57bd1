"""Acceptance rules: greedy matching, and the exact law of what speculative sampling commits."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    NoRepeatNGramLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from selfspec.decoding.acceptance import GreedyMatch, SpeculativeSampling, residual
from selfspec.decoding.drafters import Draft
from selfspec.decoding.sampling import Sampler
from tests.laws import (
    DRAFT,
    TARGET,
    TARGETS,
    FixedSampler,
    Law,
    LoadedSampler,
    Words,
    assert_same,
    completed,
    draft_words,
    enumerate_law,
    make_sampler,
    one_round,
    plain,
    verdicts,
)

# Greedy


def greedy_rule(*processors: Any) -> GreedyMatch:
    return GreedyMatch(make_sampler(Sampler, *processors, do_sample=False))


def rows(*tokens: int) -> Tensor:
    """[k, 6] logits with their maxima at `tokens`."""
    return torch.nn.functional.one_hot(torch.tensor(tokens), 6) * 4.0 + torch.arange(6) / 10


@pytest.mark.parametrize(
    ("draft", "expected"),
    [
        ([], [(3, False)]),
        ([3], [(3, True), (1, False)]),
        ([3, 1, 4], [(3, True), (1, True), (4, True), (5, False)]),
        ([3, 2, 4], [(3, True), (1, False)]),
        ([0, 1, 4], [(3, False)]),
        ([3, 1, 5], [(3, True), (1, True), (4, False)]),
    ],
)
def test_greedy_keeps_drafts_up_to_the_first_that_is_not_the_targets(
    draft: list[int], expected: list[tuple[int, bool]]
) -> None:
    logits = rows(3, 1, 4, 5)[: len(draft) + 1]
    assert verdicts(greedy_rule(), Words(0), logits, Draft(tokens=draft)) == expected
    # the general path, with a processor that changes nothing, agrees
    rule = greedy_rule(TemperatureLogitsWarper(1.0))
    assert verdicts(rule, Words(0), logits, Draft(tokens=draft)) == expected


def test_greedy_and_full_lenience_are_lossless() -> None:
    sampler = make_sampler(Sampler)
    rules = GreedyMatch(sampler), SpeculativeSampling(sampler), SpeculativeSampling(sampler, 0.99)
    assert [rule.lossless for rule in rules] == [True, True, False]


def test_greedy_compares_processed_scores() -> None:
    # 3 would repeat: the second best of the second row is 5
    rule = greedy_rule(NoRepeatNGramLogitsProcessor(1))
    found = verdicts(rule, Words(0), rows(3, 3, 1), Draft(tokens=[3, 5]))
    assert found == [(3, True), (5, True), (1, False)]


# Speculative sampling


@pytest.mark.parametrize("count", [0, 1, 2])
def test_sampled_sequences_have_exactly_the_targets_law(count: int) -> None:
    sampler = make_sampler(LoadedSampler)
    rule = SpeculativeSampling(sampler)
    law = enumerate_law(sampler, lambda: one_round(rule, sampler, count))
    assert max(map(len, law)) == count + 1
    assert_same(completed(law, 3), plain(3))


def test_a_draft_is_never_refused_where_q_equals_p() -> None:
    sampler = make_sampler(FixedSampler)
    object.__setattr__(sampler, "u", 1.0 - 2.0**-24)  # the largest float32 below 1
    target = torch.tensor([0.5, 0.25, 0.125, 0.125])
    for token in range(4):
        draft = Draft(tokens=[token], probs=[target])
        found = verdicts(SpeculativeSampling(sampler), Words(0), target.log().expand(2, 4), draft)
        assert found[0] == (token, True)
        assert not found[1][1]


def test_an_impossible_draft_is_refused_even_at_u_zero() -> None:
    sampler = make_sampler(FixedSampler)
    object.__setattr__(sampler, "u", 0.0)
    target, law = torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.0])
    draft = Draft(tokens=[0], probs=[law])
    rule = SpeculativeSampling(sampler)
    assert verdicts(rule, Words(0), target.log().expand(2, 2), draft) == [(1, False)]


@pytest.mark.parametrize("drafted", [[1, 0], [4, 4], [2, 3]])
def test_certain_drafts_keep_the_targets_law(drafted: list[int]) -> None:
    # q is 1 here, so p itself must be a multiple of 1/8
    targets = torch.stack([(torch.tensor([2, 3, 0, 1, 2]) / 8).roll(shift) for shift in range(5)])
    sampler = make_sampler(LoadedSampler)
    rule = SpeculativeSampling(sampler)
    kept: dict[int, float] = defaultdict(float)

    def play() -> tuple[int, ...]:
        words = Words(0)
        found = verdicts(rule, words, targets[[0, *drafted]].log(), Draft(tokens=drafted))
        kept[sum(is_draft for _, is_draft in found)] += sampler.dice.weight
        return tuple(words.tokens[1:])

    law = enumerate_law(sampler, play)
    assert_same(completed(law, 3, targets), plain(3, targets))
    first = float(targets[0, drafted[0]])
    second = float(targets[drafted[0], drafted[1]])
    assert kept.get(1, 0.0) + kept.get(2, 0.0) == pytest.approx(first, abs=2e-7)
    assert kept.get(2, 0.0) == pytest.approx(first * second, abs=2e-7)


def test_tokens_that_processors_forbid_are_never_committed() -> None:
    # the best three of 4, 2, 2, 1, 1 are 1/2, 1/4, 1/4
    logits = torch.tensor([4.0, 2.0, 2.0, 1.0, 1.0]).log()
    sampler = make_sampler(LoadedSampler, TopKLogitsWarper(3))
    rule = SpeculativeSampling(sampler)
    law = torch.tensor([0.25, 0.25, 0.0, 0.5, 0.0])

    def play() -> tuple[int, ...]:
        words, draft = Words(0), draft_words(sampler, 0, 1, law.expand(5, 5))
        verdicts(rule, words, logits.expand(2, 5), draft)
        return tuple(words.tokens[1:])

    targets = torch.tensor([0.5, 0.25, 0.25, 0.0, 0.0]).expand(5, 5)
    assert_same(completed(enumerate_law(sampler, play), 2, targets), plain(2, targets))


def test_processors_see_the_committed_token_not_the_refused_draft() -> None:
    # no token may come twice: the second one's law depends on which was really committed first
    sampler = make_sampler(LoadedSampler, NoRepeatNGramLogitsProcessor(1))
    rule = SpeculativeSampling(sampler)
    logits = torch.tensor([1.0, 1.0, 0.5, 0.5]).log()  # without token 0: 1/2, 1/4, 1/4
    uniform = torch.full((4, 4), 0.25)

    def play() -> tuple[int, ...]:
        words = Words(0)
        while len(words.tokens) < 3:
            verdicts(rule, words, logits.expand(2, 4), draft_words(sampler, 0, 1, uniform))
        return tuple(words.tokens[1:3])

    expected: Law = {(1, 2): 1 / 4, (1, 3): 1 / 4, (2, 1): 1 / 6, (3, 1): 1 / 6}
    assert_same(enumerate_law(sampler, play), expected | {(2, 3): 1 / 12, (3, 2): 1 / 12})


@pytest.mark.parametrize("lenience", [1.0, 0.5, 0.25])
def test_lenience_has_its_closed_form(lenience: float) -> None:
    sampler = make_sampler(LoadedSampler)
    rule = SpeculativeSampling(sampler, lenience)

    def play() -> tuple[int, ...]:
        draft = draft_words(sampler, 0, 1)
        token, is_draft = verdicts(rule, Words(0), TARGETS[[0, *draft.tokens]].log(), draft)[0]
        return token, int(is_draft)

    law = enumerate_law(sampler, play)
    p, q = TARGET.tolist(), DRAFT.tolist()
    stays = [q[x] * min(1.0, p[x] / (q[x] * lenience)) if q[x] else 0.0 for x in range(5)]
    rest = [max(0.0, p[x] - q[x]) for x in range(5)]
    fresh = [(1 - sum(stays)) * rest[x] / sum(rest) for x in range(5)]
    expected: Law = {}
    for x in range(5):
        expected[x, 1], expected[x, 0] = stays[x], fresh[x]
    assert_same(law, expected)
    drift = sum(abs(law.get((x, 1), 0.0) + law.get((x, 0), 0.0) - p[x]) for x in range(5))
    assert (drift < 1e-6) == (lenience == 1.0)


# The residual


HALF = torch.tensor([0.5, 0.5])


@pytest.mark.parametrize(
    ("target", "law", "expected"),
    [
        (TARGET, DRAFT, [0, 1 / 3, 0, 0, 2 / 3]),  # p - q in sixteenths: -5, 2, -1, 0, 4
        (TARGET, TARGET.clone(), TARGET.tolist()),
        (HALF, torch.nextafter(HALF, torch.ones(2)), [0.5, 0.5]),  # rounding leaves nothing
        (HALF, torch.tensor([0.5, 0.5 - 2.0**-25]), [0.0, 1.0]),  # one unit in the last place
    ],
)
def test_the_residual_by_hand(target: Tensor, law: Tensor, expected: list[float]) -> None:
    before = target.clone(), law.clone()
    assert residual(target, law).tolist() == pytest.approx(expected, abs=1e-7)
    assert torch.equal(target, before[0])
    assert torch.equal(law, before[1])
