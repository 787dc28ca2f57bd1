"""Signals of confidence, the annealed threshold, and answers about many rows at once."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from selfspec.heads.exit_heads import ExitHeads
from selfspec.heads.heads import (
    Answer,
    Ensemble,
    ExitHead,
    ExitJudge,
    entropy,
    joined,
    scored,
    spread,
    top_probability,
)
from selfspec.model.parts import Unembedding
from tests.heads.kinds import KINDS, make_heads, train


def test_temperature_anneals_linearly_to_one_at_the_last_layer_times_what_was_calibrated() -> None:
    judge = ExitJudge(8, dict.fromkeys(range(1, 9), 0.5), anneal_strength=0.5)
    found = [judge.temperature(layer) for layer in range(1, 9)]
    assert found == [1.4375, 1.375, 1.3125, 1.25, 1.1875, 1.125, 1.0625, 1.0]
    judge = ExitJudge(30, {1: 0.5, 29: 0.5})
    assert (judge.temperature(1), judge.temperature(29)) == (1.0, 1.0)
    judge = ExitJudge(8, {2: 0.5, 4: 0.5}, anneal_strength=0.5, temperatures={2: 3.0})
    assert (judge.temperature(2), judge.temperature(4)) == (1.375 * 3.0, 1.25)


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


def test_huge_forbidden_and_equal_logits_have_exact_confidence() -> None:
    judge = ExitJudge(8, {2: 0.5}, anneal_strength=0.3)
    logits = torch.tensor([[3e38, 0.0, -torch.inf], [-3e38, -torch.inf, -torch.inf]])
    before = logits.clone()
    assert judge.confidence(logits, 2).tolist() == [1.0, 1.0]
    assert torch.equal(logits, before)
    assert judge.confidence(torch.full((1, 64), -3.25), 2).tolist() == [1 / 64]


def test_a_token_exits_from_its_layers_threshold_on() -> None:
    judge = ExitJudge(8, {2: 0.75, 4: 0.5})
    confidences = (0.75, math.nextafter(0.75, 0), 0.5, math.nan)
    assert [judge.exits(value, 2) for value in confidences] == [True, False, False, False]
    assert [judge.exits(value, 4) for value in confidences] == [True, True, True, False]


def test_spread_gives_one_value_to_all_layers_or_one_to_each() -> None:
    assert spread((0.9,), (2, 4)) == {2: 0.9, 4: 0.9}
    assert spread((0.9, 0.5), (2, 4)) == {2: 0.9, 4: 0.5}
    with pytest.raises(ValueError, match="zip"):
        spread((0.9, 0.5), (2, 4, 6))


LAW = torch.tensor([0.5, 0.25, 0.125, 0.125])


def test_entropy_is_in_nats_and_knows_impossible_tokens() -> None:
    assert entropy(LAW).item() == pytest.approx(1.75 * math.log(2), abs=1e-6)
    assert entropy(torch.tensor([[1.0, 0.0], [0.5, 0.5]])).tolist() == pytest.approx(
        [0.0, math.log(2)], abs=1e-6
    )


@pytest.mark.parametrize(
    ("weights", "scale", "expected"),
    [
        ((1, 0, 0), 1.0, 1 - 1.75 / 2),  # H / log V = 1.75 / 2
        ((0, 1, 0), 1.0, 2 / 3),  # sigmoid(log 2) = 2 / (2 + 1)
        ((0, 1, 0), 0.0, 1 / 2),
        ((0, 1, 0), 2.0, 4 / 5),
        ((0, 0, 1), 1.0, 1 / 2),  # (0.5 - 0.25) / 0.5
        ((0.5, 0.25, 0.25), 1.0, 0.5 / 8 + 0.25 * 2 / 3 + 0.25 / 2),
    ],
)
def test_each_signal_of_the_ensemble_by_hand(
    weights: tuple[float, ...], scale: float, expected: float
) -> None:
    logits = LAW.log() + 3.0  # of the same law, any constant above it
    before, signal = logits.clone(), Ensemble(weights, scale)
    assert signal(logits[None]).tolist() == pytest.approx([expected], abs=1e-6)
    assert torch.equal(logits, before)


def test_a_certain_law_has_confidence_one_and_a_flat_one_the_least() -> None:
    certain = torch.tensor([0.0, -torch.inf, -torch.inf, -torch.inf])
    for weights in ((1, 0, 0), (0, 1, 0), (0, 0, 1)):
        assert Ensemble(weights, 1.0)(certain).item() == pytest.approx(1.0, abs=1e-6)
    flat = [Ensemble(w, 1.0)(torch.zeros(4)).item() for w in ((1, 0, 0), (0, 1, 0), (0, 0, 1))]
    assert flat == pytest.approx([0.0, 0.5, 0.0], abs=1e-6)


# --- answers


LAYER, TEMPERATURE = 2, 1.3


@pytest.fixture(params=["linear", "linear-draft", "deep-fused", "logit-lens-draft"])
def heads(request: pytest.FixtureRequest, unembedding: Unembedding) -> ExitHeads:
    """Moved ones; of some only a few tokens are drafted."""
    return train(make_heads(request.param, unembedding)).requires_grad_(False)


@pytest.fixture
def head(heads: ExitHeads) -> ExitHead:
    return heads[LAYER]


def states(count: int, seed: int = 0) -> Tensor:
    """[count, d]"""
    return torch.randn(count, 32, generator=torch.Generator().manual_seed(seed))


def asked(head: ExitHead, hidden: Tensor, count: int = 3, **options: Any) -> Answer:
    features = head.features(hidden, states(len(hidden), seed=1))
    return Answer.read(*scored(head, features, TEMPERATURE, count, **options))


@pytest.mark.parametrize("count", [1, 3])
def test_tokens_are_the_likeliest_ids_of_the_model_with_their_chances(
    head: ExitHead, count: int
) -> None:
    said = asked(head, states(4), count)
    assert torch.equal(said.features, head.features(states(4), states(4, seed=1)))
    assert torch.equal(said.logits, head.unembed(said.features))
    chances = (said.logits / TEMPERATURE).softmax(-1)
    for row in range(4):
        order = chances[row].argsort(descending=True)[:count]
        assert said.tokens[row] == head.to_target_ids(order).tolist()
        # float32 summed in another order; largest difference measured: 2.4e-7
        assert said.chances[row] == pytest.approx(chances[row, order].tolist(), abs=1e-6)


def test_of_equal_tokens_the_first_is_the_answer(unembedding: Unembedding) -> None:
    head = make_heads("deep-fused", unembedding)[LAYER]  # untrained: all logits are zero
    said = asked(head.requires_grad_(False), states(2), 1)
    assert said.tokens == [[0], [0]]
    assert said.chances == [[pytest.approx(1 / 96, abs=1e-9)]] * 2  # float32


@pytest.mark.parametrize("signal", [top_probability, Ensemble((0.4, 0.3, 0.3), 1.0)])
def test_signals_are_of_the_annealed_logits(head: ExitHead, signal: Any) -> None:
    said = asked(head, states(4), signal=signal)
    assert said.signals == signal(said.logits / TEMPERATURE).tolist()
    assert asked(head, states(4)).signals == []


def test_more_guesses_than_draft_tokens_are_all_of_them(unembedding: Unembedding) -> None:
    head = train(make_heads("linear-draft", unembedding)).requires_grad_(False)[LAYER]
    said = asked(head, states(2), 99)
    assert [sorted(tokens) for tokens in said.tokens] == [[0, 3, 17, 40, 95]] * 2
    assert [sum(chances) for chances in said.chances] == pytest.approx([1.0, 1.0], abs=1e-6)


@pytest.mark.parametrize("signal", [None, top_probability])
def test_tokens_chances_and_signals_come_in_one_read(
    head: ExitHead, signal: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[tuple[int, ...]] = []
    right = Tensor.tolist

    def tolist(self: Tensor) -> Any:
        reads.append(tuple(self.shape))
        return right(self)

    monkeypatch.setattr(Tensor, "tolist", tolist)
    asked(head, states(4), 3, signal=signal)
    assert reads == [(4, 6 if signal is None else 7)]


class Certain(ExitHead):
    """Stands in for a head of a huge vocabulary that names one token of it."""

    def __init__(self, token: int) -> None:
        torch.nn.Module.__init__(self)
        self.token = token

    def features(self, hidden: Tensor, deep: Tensor | None = None) -> Tensor:
        return hidden

    def unembed(self, features: Tensor) -> Tensor:
        return features[:, :2]

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        return torch.full_like(draft_ids, self.token)

    _build: Any = None


@pytest.mark.parametrize("token", [0, 7, 151_935, 2**24])
def test_ids_are_exact_beside_chances(token: int) -> None:
    said = asked(Certain(token), states(1), 1)
    assert said.tokens == [[token]]


# Rows of many texts


def test_a_part_is_the_answer_about_its_rows(head: ExitHead) -> None:
    whole = asked(head, states(5), signal=top_probability)
    part = whole.part(slice(1, 3))
    assert torch.equal(part.features, whole.features[1:3])
    assert torch.equal(part.logits, whole.logits[1:3])
    assert part.tokens == whole.tokens[1:3]
    assert part.chances == whole.chances[1:3]
    assert part.signals == whole.signals[1:3]


@pytest.mark.parametrize("kind", KINDS)
def test_many_rows_are_answered_as_each_alone(kind: str, unembedding: Unembedding) -> None:
    head = train(make_heads(kind, unembedding)).requires_grad_(False)[LAYER]
    hidden, deep = states(6), states(6, seed=1)
    options: dict[str, Any] = {"temperature": TEMPERATURE, "count": 2}
    together = Answer.read(*scored(head, head.features(hidden, deep), **options))
    for row in range(6):
        features = head.features(hidden[row : row + 1], deep[row : row + 1])
        single = Answer.read(*scored(head, features, **options))
        assert together.tokens[row] == single.tokens[0]
        # float32 products of other shapes; largest difference measured: 8.9e-7
        assert together.chances[row] == pytest.approx(single.chances[0], abs=1e-5)


def test_what_a_text_does_not_know_is_zeros_beside_what_others_know() -> None:
    hidden, deep = [states(2), states(1), states(3)], [None, states(1, seed=1), None]
    found = joined(deep, hidden)
    assert found is not None
    expected = torch.cat([torch.zeros(2, 32), states(1, seed=1), torch.zeros(3, 32)])
    assert torch.equal(found, expected)
    assert joined([None, None, None], hidden) is None
