"""Acceptance rules: greedy matching, and the exact law of what speculative sampling commits."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList
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


def test_greedy_is_lossless() -> None:
    assert GreedyMatch(make_sampler(Sampler, do_sample=False)).lossless


def test_greedy_processors_see_each_true_prefix_once() -> None:
    seen: list[list[int]] = []

    def note(ids: Tensor, scores: Tensor) -> Tensor:
        seen.append(ids[0].tolist())
        return scores

    verdicts(greedy_rule(note), Words(7, 8), rows(3, 1, 4, 5), Draft(tokens=[3, 2, 4]))
    assert seen == [[7, 8], [7, 8, 3]]


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


def test_a_draft_stays_with_the_smaller_of_one_and_p_over_q() -> None:
    sampler = make_sampler(LoadedSampler)
    rule = SpeculativeSampling(sampler)
    for token, expected in enumerate(DRAFT.tolist()):
        if not expected:
            continue
        draft = Draft(tokens=[token], probs=[DRAFT])

        def play(draft: Draft = draft) -> tuple[int, ...]:
            logits = TARGETS[[0, *draft.tokens]].log()
            return (int(verdicts(rule, Words(0), logits, draft)[0][1]),)

        kept = enumerate_law(sampler, play).get((1,), 0.0)
        assert kept == pytest.approx(min(1.0, float(TARGET[token]) / expected), abs=2e-7)


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


def test_drafts_from_a_disjoint_support_are_replaced_by_the_target() -> None:
    sampler = make_sampler(LoadedSampler)
    rule = SpeculativeSampling(sampler)
    target, law = torch.tensor([0.0, 0.25, 0.0, 0.75]), torch.tensor([0.5, 0.0, 0.5, 0.0])

    def play() -> tuple[int, ...]:
        draft = draft_words(sampler, 0, 1, law.expand(4, 4))
        found = verdicts(rule, Words(0), target.log().expand(2, 4), draft)
        assert [is_draft for _, is_draft in found] == [False]
        return (found[0][0],)

    assert_same(enumerate_law(sampler, play), {(1,): 0.25, (3,): 0.75})


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


def test_only_full_lenience_calls_itself_lossless() -> None:
    sampler = make_sampler(Sampler)
    assert SpeculativeSampling(sampler).lossless
    assert not SpeculativeSampling(sampler, 0.99).lossless


@torch.inference_mode()
def test_thirty_thousand_sampled_sequences_pass_a_chi_square_test() -> None:
    draws, length = 30_000, 3
    generator = torch.Generator().manual_seed(0)
    sampler = Sampler(LogitsProcessorList(), do_sample=True, generator=generator)
    rule = SpeculativeSampling(sampler)
    # any laws will do here: 5 tokens, given the one before
    targets, drafts = (0.7 * torch.randn(2, 5, 5, generator=generator)).softmax(-1)
    logits, words, counts = targets.log(), Words(), Counter[tuple[int, ...]]()
    for _ in range(draws):
        words.tokens = [0]
        while (missing := length + 1 - len(words.tokens)) > 0:
            draft = draft_words(sampler, words.tokens[-1], missing - 1, drafts)
            verdicts(rule, words, logits[[words.tokens[-1], *draft.tokens]], draft)
        counts[tuple(words.tokens[1:])] += 1
    law = plain(length, targets)
    assert min(law.values()) * draws > 5  # enough for the test to hold
    statistic = sum((counts[s] - draws * p) ** 2 / (draws * p) for s, p in law.items())
    tail = torch.special.gammaincc(torch.tensor((len(law) - 1) / 2), torch.tensor(statistic / 2))
    assert tail > 1e-3


# The residual


def test_the_residual_by_hand() -> None:
    # p - q in sixteenths: -5, 2, -1, 0, 4
    assert residual(TARGET, DRAFT).tolist() == pytest.approx([0, 1 / 3, 0, 0, 2 / 3], abs=1e-7)


def test_the_residual_of_equal_laws_is_the_law_itself() -> None:
    assert torch.equal(residual(TARGET, TARGET.clone()), TARGET)


def test_the_residual_where_rounding_leaves_nothing_is_the_target() -> None:
    target = torch.tensor([0.3, 0.7])
    assert torch.equal(residual(target, torch.nextafter(target, torch.ones(2))), target)


def test_the_residual_changes_neither_law() -> None:
    target, law = torch.tensor([0.25, 0.75]), torch.tensor([0.5, 0.5])
    residual(target, law)
    assert target.tolist() == [0.25, 0.75]
    assert law.tolist() == [0.5, 0.5]


def test_the_tiniest_difference_still_gives_a_law() -> None:
    target = torch.tensor([0.5, 0.5])
    law = torch.tensor([0.5, 0.5 - 2.0**-25])  # one unit in the last place below
    assert residual(target, law).tolist() == [0.0, 1.0]
