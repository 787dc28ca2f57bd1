"""The closed form of lenience is the law that the rule's code commits."""

from __future__ import annotations

import pytest
import torch

from eval.papers.divergence import acceptance, committed, random_laws, total_variation
from selfspec.decoding.acceptance import SpeculativeSampling
from tests.laws import DRAFTS, TARGETS, LoadedSampler, enumerate_law, make_sampler, one_round


@pytest.mark.parametrize("lenience", [1.0, 0.5])
def test_the_closed_form_is_what_every_outcome_of_the_rule_adds_up_to(lenience: float) -> None:
    sampler = make_sampler(LoadedSampler)
    rule = SpeculativeSampling(sampler, lenience)
    law = enumerate_law(sampler, lambda: one_round(rule, sampler, 1)[:1])
    found = committed(TARGETS[0], DRAFTS[0], lenience)
    for token, weight in enumerate(found.tolist()):
        # float32 probabilities, as in tests/laws.py
        assert law.get((token,), 0.0) == pytest.approx(weight, abs=2e-7)


def test_without_lenience_the_law_is_the_targets() -> None:
    target, draft = random_laws(50, 6, 0.7)
    # float64; largest difference measured: 2e-16
    torch.testing.assert_close(committed(target, draft, 1.0), target, rtol=0, atol=1e-12)


def test_more_stays_and_the_law_moves_further_the_lower_it_gets() -> None:
    target, draft = random_laws(50, 6, 0.7)
    values = (1.0, 0.8, 0.5, 0.2, 0.01)
    kept = [acceptance(target, draft, value).mean() for value in values]
    moved = [total_variation(committed(target, draft, value), target).mean() for value in values]
    assert kept == sorted(kept)
    assert moved == sorted(moved)
    assert kept[-1] <= 1.0 + 1e-12
    # at last the draft's own law is committed
    assert moved[-1] <= total_variation(draft, target).mean() + 1e-12


def test_acceptance_is_bought_with_total_variation_one_for_one() -> None:
    target, draft = random_laws(50, 6, 0.7)
    gained = acceptance(target, draft, 0.4) - acceptance(target, draft, 1.0)
    moved = total_variation(committed(target, draft, 0.4), target)
    # float64; a few roundings of numbers up to 1
    torch.testing.assert_close(moved, gained, rtol=0, atol=1e-12)


def test_equal_laws_are_not_refused_and_do_not_move() -> None:
    law = torch.tensor([[0.5, 0.25, 0.25]])
    assert acceptance(law, law, 1.0).tolist() == [1.0]
    assert torch.equal(committed(law, law, 0.5), law)
    assert total_variation(law, law).tolist() == [0.0]
    apart = total_variation(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]))
    assert apart.item() == 1.0
