"""Acceptance rules: greedy matching, and the exact distribution of each rule's tokens."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation.logits_process import NoRepeatNGramLogitsProcessor, TopKLogitsWarper

from selfspec import options as rules
from selfspec.api.speculator import wrap
from selfspec.config import SpeculationOptions
from selfspec.decoding.acceptance import (
    AcceptanceRule,
    CmAsd,
    Draft,
    Easd,
    SpeculativeSampling,
    acceptance_rule,
    residual,
)
from selfspec.decoding.sampling import Sampler
from selfspec.heads.heads import entropy
from tests import laws
from tests.ladder import greedy
from tests.laws import DRAFT, TARGET, Text, assert_same, drafted, verdicts
from tests.models import make_model, random_ids


@pytest.mark.parametrize("count", [0, 1, 2])
def test_sampled_sequences_have_exactly_the_targets_distribution(count: int) -> None:
    rule = SpeculativeSampling(sampler := laws.loaded())

    def play() -> tuple[int, ...]:
        text, draft = Text([0]), laws.draft_words(sampler, count)
        verdicts(rule, text, laws.TARGETS[[0, *draft.tokens]].log(), draft)
        return tuple(text.tokens[1:])

    law = laws.enumerate_law(sampler, play)
    assert max(map(len, law)) == count + 1
    assert_same(laws.completed(law, 3), laws.plain(3))


def uniform_is(number: float, patch: pytest.MonkeyPatch) -> SpeculativeSampling:
    """A rule whose uniform numbers are all `number`."""
    patch.setattr(Sampler, "uniform", lambda *_: torch.tensor(number))
    return SpeculativeSampling(replace(greedy(), do_sample=True))


def test_a_draft_is_never_refused_where_q_equals_p(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = uniform_is(1.0 - 2.0**-24, monkeypatch)  # the largest float32 below 1
    target = torch.tensor([0.5, 0.25, 0.125, 0.125])
    for token in range(4):
        pairs = verdicts(rule, Text([0]), target.log().expand(2, 4), drafted(token, target))
        assert pairs[0] == (token, True)
        assert not pairs[1][1]


def test_an_impossible_draft_is_refused_even_at_u_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    rule, target = uniform_is(0.0, monkeypatch), torch.tensor([0.0, 1.0])
    draft = drafted(0, torch.tensor([1.0, 0.0]))
    assert verdicts(rule, Text([0]), target.log().expand(2, 2), draft) == [(1, False)]


@pytest.mark.parametrize("tokens", [[1, 0], [4, 4], [2, 3]])
def test_certain_drafts_keep_the_targets_distribution(tokens: list[int]) -> None:
    rule = SpeculativeSampling(sampler := laws.loaded())
    kept: dict[int, float] = defaultdict(float)

    def play() -> tuple[int, ...]:
        text = Text([0])
        pairs = verdicts(rule, text, laws.TARGETS[[0, *tokens]].log(), Draft.of(tokens))
        kept[sum(is_draft for _, is_draft in pairs)] += sampler.dice.weight
        return tuple(text.tokens[1:])

    law = laws.enumerate_law(sampler, play)
    assert_same(laws.completed(law, 3), laws.plain(3))
    first, both = laws.chance([0, tokens[0]]), laws.chance([0, *tokens])
    assert kept.get(1, 0.0) + kept.get(2, 0.0) == pytest.approx(first, abs=2e-7)
    assert kept.get(2, 0.0) == pytest.approx(both, abs=2e-7)


def test_processors_see_the_committed_token_not_the_refused_draft() -> None:
    # no token may repeat: the second distribution depends on the token that was committed first
    rule = SpeculativeSampling(sampler := laws.loaded(NoRepeatNGramLogitsProcessor(1)))
    logits = torch.tensor([1.0, 1.0, 0.5, 0.5]).log()  # without token 0: 1/2, 1/4, 1/4
    uniform = torch.full((4, 4), 0.25)

    def play() -> tuple[int, ...]:
        text = Text([0])
        while len(text.tokens) < 3:
            verdicts(rule, text, logits.expand(2, 4), laws.draft_words(sampler, 1, uniform))
        return tuple(text.tokens[1:3])

    expected: laws.Law = {(1, 2): 1 / 4, (1, 3): 1 / 4, (2, 1): 1 / 6, (3, 1): 1 / 6}
    assert_same(laws.enumerate_law(sampler, play), expected | {(2, 3): 1 / 12, (3, 2): 1 / 12})


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
    copies = target.clone(), law.clone()
    assert residual(target, law).tolist() == pytest.approx(expected, abs=1e-7)
    assert torch.equal(target, copies[0])
    assert torch.equal(law, copies[1])


# --- lossy rules: lenience, CM-ASD and EASD


LOGITS = TARGET.log().expand(2, 5)
"""Of the draft's and the bonus row: 3, 6, 1, 2, 4 sixteenths; the draft has 8, 4, 2, 2, 0."""


def cm_asd(sampler: Sampler, tolerance: float, confidence: float = 0.0, **options: Any) -> CmAsd:
    fields: dict[str, Any] = {"top_beta": 5, "tolerance_gain": 0.0} | options
    rule = CmAsd(sampler, rules.CmAsd(tolerance=tolerance, **fields))
    rule._signal = lambda _: torch.tensor(confidence)
    return rule


def easd(sampler: Sampler, entropy_threshold: float = 0.0, overlap_threshold: float = 0.4) -> Easd:
    # of the best two, {1, 4} and {0, 1}, one is in common
    return Easd(sampler, rules.Easd(entropy=entropy_threshold, overlap=overlap_threshold, tokens=2))


def greedy_choices(rule: AcceptanceRule) -> list[int]:
    """The token committed for each of the five tokens, drafted alone."""
    pairs = [verdicts(rule, Text([0]), LOGITS, drafted(token, DRAFT))[0] for token in range(5)]
    assert all(is_draft == (token == draft) for draft, (token, is_draft) in enumerate(pairs))
    return [token for token, _ in pairs]


def sampled_law(make_rule: Callable[[Sampler], AcceptanceRule]) -> laws.Law:
    """Exact distribution of (token, whether it is the draft) for drafts drawn from DRAFT."""
    rule = make_rule(sampler := laws.loaded())

    def play() -> tuple[int, ...]:
        draft = drafted(sampler.draw(DRAFT), DRAFT)
        token, is_draft = verdicts(rule, Text([0]), LOGITS, draft)[0]
        return token, int(is_draft)

    return laws.enumerate_law(sampler, play)


def closed_form(kept: list[float], replaced: list[float]) -> laws.Law:
    law: laws.Law = {(x, 1): kept[x] for x in range(5)}
    return law | {(x, 0): replaced[x] for x in range(5)}


@pytest.mark.parametrize("lenience", [1.0, 0.5, 0.25])
def test_lenience_has_its_closed_form(lenience: float) -> None:
    law = sampled_law(lambda sampler: SpeculativeSampling(sampler, lenience))
    p, q = TARGET.tolist(), DRAFT.tolist()
    kept = [q[x] * min(1.0, p[x] / (q[x] * lenience)) if q[x] else 0.0 for x in range(5)]
    surplus = [max(0.0, p[x] - q[x]) for x in range(5)]
    replaced = [(1 - sum(kept)) * surplus[x] / sum(surplus) for x in range(5)]
    assert_same(law, closed_form(kept, replaced))
    drift = sum(abs(law.get((x, 1), 0.0) + law.get((x, 0), 0.0) - p[x]) for x in range(5))
    assert (drift < 1e-6) == (lenience == 1.0)


@pytest.mark.parametrize(
    ("tolerance", "top_beta", "expected"),
    [
        # distance from the best, token 1, in nats: log 2, 0, log 6, log 3, log 1.5
        (0.0, 5, {1}),
        (0.41, 5, {1, 4}),
        (0.70, 5, {0, 1, 4}),
        (9.0, 5, {0, 1, 2, 3, 4}),
        (9.0, 3, {0, 1, 4}),
        (9.0, 1, {1}),
        (9.0, 99, {0, 1, 2, 3, 4}),
    ],
)
def test_greedy_cm_asd_keeps_tokens_near_the_targets_best(
    tolerance: float, top_beta: int, expected: set[int]
) -> None:
    rule = cm_asd(greedy(), tolerance, top_beta=top_beta)
    assert greedy_choices(rule) == [x if x in expected else 1 for x in range(5)]


@pytest.mark.parametrize(
    ("reading", "confidence", "expected"),
    # tau = 0.3 + 0.45 C in the intended reading, 0.3 + 0.45 (1 - C) in the printed one
    [("intent", 1.0, True), ("intent", 0.0, False), ("paper", 1.0, False), ("paper", 0.0, True)],
)
def test_the_two_readings_move_the_tolerance_in_opposite_directions(
    reading: str, confidence: float, expected: bool
) -> None:
    options = {"reading": reading, "tolerance_gain": 0.45}
    rule = cm_asd(greedy(), 0.3, confidence, **options)
    assert (greedy_choices(rule)[0] == 0) is expected  # token 0 lies 0.69 below the best


def test_a_draft_without_belief_counts_as_certain() -> None:
    rule = cm_asd(greedy(), 0.0, 0.0, tolerance_gain=0.7)
    assert verdicts(rule, Text([0]), LOGITS, Draft.of([0]))[0] == (0, True)
    assert verdicts(rule, Text([0]), LOGITS, drafted(0, DRAFT))[0] == (1, False)


@pytest.mark.parametrize("tolerance", [0.0, 0.41, 0.7, 9.0])
def test_sampled_cm_asd_has_its_closed_form(tolerance: float) -> None:
    law = sampled_law(lambda sampler: cm_asd(sampler, tolerance))
    p, q = TARGET.tolist(), DRAFT.tolist()
    kept = [q[x] * (math.log(p[1] / p[x]) <= tolerance) for x in range(5)]
    assert_same(law, closed_form(kept, [(1 - sum(kept)) * p[x] for x in range(5)]))


def test_cm_asd_uses_processed_scores() -> None:
    rule = cm_asd(Sampler(LogitsProcessorList([TopKLogitsWarper(2)])), 9.0)
    assert greedy_choices(rule) == [1, 1, 1, 1, 4]


LOW, HIGH = sorted(entropy(torch.stack([TARGET, DRAFT])).tolist())


@pytest.mark.parametrize(
    ("entropy_threshold", "overlap_threshold", "penalised"),
    [
        (LOW - 1e-3, 0.4, True),
        (LOW + 1e-3, 0.4, False),
        (HIGH - 1e-3, 0.4, False),  # both must exceed it
        (0.0, 0.49, True),
        (0.0, 0.5, False),  # ">", not "at least"
    ],
)
def test_easd_penalises_above_both_thresholds_only(
    entropy_threshold: float, overlap_threshold: float, penalised: bool
) -> None:
    rule = easd(greedy(), entropy_threshold, overlap_threshold)
    # the target's best is 1, its second best 4
    assert greedy_choices(rule) == [1, 4 if penalised else 1, 1, 1, 1]


def test_easd_without_a_belief_is_greedy_matching() -> None:
    rule = easd(greedy())
    assert verdicts(rule, Text([0]), LOGITS, Draft.of([1]))[0] == (1, True)
    assert verdicts(rule, Text([0]), LOGITS, Draft.of([4]))[0] == (1, False)


def test_sampled_easd_never_keeps_a_penalised_draft() -> None:
    p, q = TARGET.tolist(), DRAFT.tolist()
    replaced = [
        sum(q[x] * p[y] / (1 - p[x]) for x in range(5) if x != y) for y in range(5)
    ]  # a draw from the target without the draft's token
    assert_same(sampled_law(easd), closed_form([0.0] * 5, replaced))


def test_sampled_easd_keeps_other_drafts_by_the_ratio_and_replaces_from_the_target() -> None:
    p, q = TARGET.tolist(), DRAFT.tolist()
    kept = [min(p[x], q[x]) for x in range(5)]
    law = sampled_law(lambda sampler: easd(sampler, entropy_threshold=9.0))
    assert_same(law, closed_form(kept, [(1 - sum(kept)) * p[x] for x in range(5)]))
    # not the target's distribution: that would need draws from the residual
    assert law[0, 1] + law[0, 0] != pytest.approx(p[0], abs=1e-3)


@pytest.mark.parametrize("changed", [{"weights": (0.0, 1.0, 0.0)}, {"margin_scale": 9.0}], ids=str)
def test_options_of_a_rule_reach_its_ensemble(changed: Any) -> None:
    base = rules.CmAsd(tolerance=0.1, tolerance_gain=0.6)
    # C is 0.4 * 0.246 + 0.3 * 2/3 + 0.3 / 2 = 0.448, tau 0.37; token 4 lies 0.41 below the best
    for options, kept in ((base, False), (replace(base, **changed), True)):
        rule = acceptance_rule(greedy(), SpeculationOptions(acceptance=options))
        assert verdicts(rule, Text([0]), LOGITS, drafted(4, DRAFT))[0][1] is kept


def test_a_lossy_rule_that_drafts_is_announced_once(caplog: pytest.LogCaptureFixture) -> None:
    speculator = wrap(make_model("llama"), heads="logit-lens", acceptance="cm-asd")
    with caplog.at_level(logging.WARNING, "selfspec"):
        for drafter in ("none", "exit", "exit"):
            answer = speculator.generate(random_ids(5), max_new_tokens=2, drafter=drafter)
            assert answer.stats.lossless is (drafter == "none")
        options: dict[str, Any] = {"drafter": "none", "acceptance": "lenient"}
        assert speculator.generate(random_ids(5), max_new_tokens=2, **options).stats.lossless
    warnings = [entry.message for entry in caplog.records if entry.levelno >= logging.WARNING]
    assert warnings == ["lossy acceptance: the output differs from the model's own"]
