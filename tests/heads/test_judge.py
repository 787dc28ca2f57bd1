"""The annealed confidence threshold, against values worked by hand and against a full softmax."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from selfspec.heads.heads import ExitJudge, spread


def logits_of(*probs: float, temperature: float = 1.0) -> Tensor:
    """[1, V] logits whose softmax at `temperature` is `probs`."""
    return torch.tensor([[temperature * math.log(p) + 0.7 for p in probs]])


def test_temperature_anneals_linearly_to_one_at_the_last_layer() -> None:
    judge = ExitJudge(8, dict.fromkeys(range(1, 9), 0.5), anneal_strength=0.5)
    found = [judge.temperature(layer) for layer in range(1, 9)]
    assert found == [1.4375, 1.375, 1.3125, 1.25, 1.1875, 1.125, 1.0625, 1.0]


def test_alpha_zero_turns_annealing_off() -> None:
    judge = ExitJudge(30, {1: 0.5, 29: 0.5})
    assert (judge.temperature(1), judge.temperature(29)) == (1.0, 1.0)


def test_calibrated_temperatures_multiply_and_default_to_one() -> None:
    judge = ExitJudge(8, {2: 0.5, 4: 0.5}, anneal_strength=0.5, temperatures={2: 3.0})
    assert judge.temperature(2) == 1.375 * 3.0
    assert judge.temperature(4) == 1.25


def test_confidence_is_the_top_probability_at_the_layers_temperature() -> None:
    judge = ExitJudge(8, {4: 0.5, 8: 0.5}, anneal_strength=1.0)  # T_4 = 1.5
    shallow = judge.confidence(logits_of(0.1, 0.7, 0.2, temperature=1.5), 4)
    deep = judge.confidence(logits_of(0.1, 0.7, 0.2), 8)
    # 2e-7: two units in the last place of a float32 near 0.7
    assert shallow.tolist() == pytest.approx([0.7], abs=2e-7)
    assert deep.tolist() == pytest.approx([0.7], abs=2e-7)


def test_two_logits_by_hand() -> None:
    # softmax([0, ln 9] / 2) = (1, 3) / 4
    judge = ExitJudge(2, {1: 0.5}, anneal_strength=2.0)
    confidence = judge.confidence(torch.tensor([[0.0, math.log(9.0)]]), 1)
    assert confidence.tolist() == pytest.approx([0.75], abs=2e-7)


def test_equal_logits_give_one_over_v_exactly() -> None:
    judge = ExitJudge(8, {2: 0.5}, anneal_strength=0.3)
    assert judge.confidence(torch.full((1, 64), -3.25), 2).tolist() == [1 / 64]


@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
def test_confidence_equals_that_of_a_full_softmax(scale: float) -> None:
    logits = torch.randn(50, 96, generator=torch.Generator().manual_seed(0)) * scale
    judge = ExitJudge(8, {3: 0.5}, anneal_strength=0.4, temperatures={3: 1.3})
    temperature = (1 + 0.4 * (1 - 3 / 8)) * 1.3
    full = (logits.double() / temperature).softmax(-1).amax(-1)
    found = judge.confidence(logits, 3)
    assert found.shape == (50,)
    # largest relative difference measured over the three scales: 1.4e-7
    assert (found.double() / full - 1).abs().max() < 3e-7


def test_huge_and_forbidden_logits_do_not_overflow() -> None:
    judge = ExitJudge(8, {2: 0.5})
    logits = torch.tensor([[3e38, 0.0, -torch.inf], [-3e38, -torch.inf, -torch.inf]])
    assert judge.confidence(logits, 2).tolist() == [1.0, 1.0]


def test_confidence_leaves_the_logits_as_they_are() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    ExitJudge(8, {2: 0.5}, anneal_strength=1.0).confidence(logits, 2)
    assert logits.tolist() == [[1.0, 2.0, 3.0]]


def test_a_token_exits_exactly_from_the_threshold_on() -> None:
    judge = ExitJudge(8, {2: 0.75})
    below = math.nextafter(0.75, 0)
    assert judge.exits(0.75, 2)
    assert not judge.exits(below, 2)
    assert not judge.exits(math.nan, 2)


def test_each_layer_has_its_own_threshold() -> None:
    judge = ExitJudge(8, {2: 0.9, 4: 0.5, 6: 0.7})
    assert [judge.exits(0.6, layer) for layer in (2, 4, 6)] == [False, True, False]
    assert [judge.exits(0.8, layer) for layer in (2, 4, 6)] == [False, True, True]


def test_a_shallow_layer_needs_more_evidence_than_a_deep_one() -> None:
    judge = ExitJudge(8, {2: 0.8, 6: 0.8}, anneal_strength=0.5)
    logits = logits_of(0.85, 0.1, 0.05)
    exits = [judge.exits(float(judge.confidence(logits, layer)), layer) for layer in (2, 6)]
    # T_2 = 1.375: c = 0.755; T_6 = 1.125: c = 0.817
    assert exits == [False, True]


def test_spread_gives_one_value_to_all_layers_or_one_to_each() -> None:
    assert spread((0.9,), (2, 4)) == {2: 0.9, 4: 0.9}
    assert spread((0.9, 0.5), (2, 4)) == {2: 0.9, 4: 0.5}
    with pytest.raises(ValueError, match="zip"):
        spread((0.9, 0.5), (2, 4, 6))
