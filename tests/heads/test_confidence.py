"""Signals of confidence, on laws worked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from selfspec.heads.heads import Ensemble, entropy, top_probability

LAW = torch.tensor([0.5, 0.25, 0.125, 0.125])


def test_entropy_is_in_nats_and_knows_impossible_tokens() -> None:
    assert entropy(LAW).item() == pytest.approx(1.75 * math.log(2), abs=1e-6)
    assert entropy(torch.tensor([[1.0, 0.0], [0.5, 0.5]])).tolist() == pytest.approx(
        [0.0, math.log(2)], abs=1e-6
    )


def test_top_probability_is_that_of_the_softmax() -> None:
    assert top_probability(LAW.log()[None]).tolist() == pytest.approx([0.5], abs=1e-6)
    assert top_probability(2 * LAW.log()[None], 2.0).tolist() == pytest.approx([0.5], abs=1e-6)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ((1, 0, 0), 1 - 1.75 / 2),  # H / log V = 1.75 / 2
        ((0, 1, 0), 2 / 3),  # sigmoid(log 2) = 2 / (2 + 1)
        ((0, 0, 1), 1 / 2),  # (0.5 - 0.25) / 0.5
        ((0.5, 0.25, 0.25), 0.5 / 8 + 0.25 * 2 / 3 + 0.25 / 2),
    ],
)
def test_each_signal_of_the_ensemble_by_hand(weights: tuple[float, ...], expected: float) -> None:
    signal = Ensemble(weights, 1.0)
    assert signal(LAW.log()[None]).tolist() == pytest.approx([expected], abs=1e-6)
    # logits of the same law, any constant above it
    assert signal(LAW.log() + 3.0).item() == pytest.approx(expected, abs=1e-6)


def test_the_margins_scale_sharpens_it() -> None:
    found = [Ensemble((0, 1, 0), beta)(LAW.log()).item() for beta in (0.0, 1.0, 2.0)]
    assert found == pytest.approx([1 / 2, 2 / 3, 4 / 5], abs=1e-6)


def test_a_certain_law_has_confidence_one_and_a_flat_one_the_least() -> None:
    certain = torch.tensor([0.0, -torch.inf, -torch.inf, -torch.inf])
    for weights in ((1, 0, 0), (0, 1, 0), (0, 0, 1)):
        assert Ensemble(weights, 1.0)(certain).item() == pytest.approx(1.0, abs=1e-6)
    flat = [Ensemble(w, 1.0)(torch.zeros(4)).item() for w in ((1, 0, 0), (0, 1, 0), (0, 0, 1))]
    assert flat == pytest.approx([0.0, 0.5, 0.0], abs=1e-6)


def test_signals_leave_the_logits_as_they_are() -> None:
    logits = LAW.log()[None]
    before = logits.clone()
    top_probability(logits)
    Ensemble((0.4, 0.3, 0.3), 1.0)(logits)
    assert torch.equal(logits, before)
