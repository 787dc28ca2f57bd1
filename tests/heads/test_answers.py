"""Heads asked about many rows at once: the same answers as one by one, and one device read."""

from __future__ import annotations

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
    answer,
    joined,
    top_probability,
)
from selfspec.model.parts import Unembedding
from tests.heads.kinds import KINDS, make_heads, train

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
    deep = states(len(hidden), seed=1)
    return answer(head, hidden, deep, temperature=TEMPERATURE, count=count, **options)


def test_an_answer_holds_what_the_head_computes(head: ExitHead) -> None:
    hidden = states(4)
    said = asked(head, hidden)
    features = head.features(hidden, states(4, seed=1))
    assert torch.equal(said.features, features)
    assert torch.equal(said.logits, head.unembed(features))


def test_tokens_are_the_likeliest_ids_of_the_model_with_their_chances(head: ExitHead) -> None:
    said = asked(head, states(4))
    chances = (said.logits / TEMPERATURE).softmax(-1)
    for row in range(4):
        order = chances[row].argsort(descending=True)[:3]
        assert said.tokens[row] == head.to_target_ids(order).tolist()
        # float32 summed in another order; largest difference measured: 2.4e-7
        assert said.chances[row] == pytest.approx(chances[row, order].tolist(), abs=1e-6)


@pytest.mark.parametrize("count", [1, 2])
def test_the_first_is_the_argmax_with_the_judges_confidence(head: ExitHead, count: int) -> None:
    said = asked(head, states(5), count)
    judge = ExitJudge(6, {LAYER: 0.5}, temperatures={LAYER: TEMPERATURE})
    best = head.to_target_ids(said.logits.argmax(-1)).tolist()
    assert [tokens[0] for tokens in said.tokens] == best
    expected = judge.confidence(said.logits, LAYER).tolist()
    # float32, the same sum; largest difference measured: 0
    assert [chances[0] for chances in said.chances] == pytest.approx(expected, abs=2e-7)


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
    parts: Any = None


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
    together = answer(head, hidden, deep, **options)
    for row in range(6):
        single = answer(head, hidden[row : row + 1], deep[row : row + 1], **options)
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


def test_an_unknown_deep_state_counts_as_zeros(unembedding: Unembedding) -> None:
    """So a text is answered alike whether or not others beside it know theirs."""
    head = train(make_heads("deep-fused", unembedding)).requires_grad_(False)[LAYER]
    hidden, options = states(2), {"temperature": TEMPERATURE, "count": 2}
    unknown = answer(head, hidden, None, **options)  # type: ignore[arg-type]  # by name
    zeros = answer(head, hidden, torch.zeros_like(hidden), **options)  # type: ignore[arg-type]  # by name
    assert unknown.tokens == zeros.tokens
    assert torch.equal(unknown.logits, zeros.logits)
