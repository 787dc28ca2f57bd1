"""Likelihoods that are noted beside tokens, and penalties for tokens that are there already."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from selfspec.api.speculator import Speculator, wrap
from selfspec.api.stream import Generation
from selfspec.decoding.sampling import OccurrencePenalty
from selfspec.errors import InvalidOption
from tests.models import VOCAB_SIZE, make_model, random_ids


@pytest.fixture(scope="module")
def model() -> Speculator:
    made = make_model("llama", torch.float64)
    return wrap(made, heads="logit-lens", executor="generic")


@pytest.mark.parametrize("drafts", [{"speculate": False}, {"drafter": "exit:threshold=0.01"}])
@pytest.mark.parametrize("drawing", [{}, {"do_sample": True, "temperature": 3.0, "seed": 1}])
def test_likelihoods_are_those_of_the_models_own_logits(
    model: Speculator, drafts: dict[str, Any], drawing: dict[str, Any]
) -> None:
    ids = random_ids(9)
    found = model.generate(ids, max_new_tokens=12, logprobs=3, **drafts, **drawing)
    whole = torch.tensor([ids[0].tolist() + found.token_ids])
    logs = model.model(whole).logits[0, 8:-1].log_softmax(-1)
    assert found.logprobs is not None
    assert [one.token for one in found.logprobs] == found.token_ids
    for row, one in zip(logs, found.logprobs, strict=True):
        assert one.logprob == pytest.approx(float(row[one.token]), abs=1e-4)
        assert [token for token, _ in one.top] == row.topk(3).indices.tolist()
        assert [said for _, said in one.top] == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)
    if drawing:
        assert any(one.token != one.top[0][0] for one in found.logprobs)


def test_they_are_noted_only_where_asked_for(model: Speculator) -> None:
    assert model.generate(random_ids(4), max_new_tokens=3).logprobs is None
    none = model.generate(random_ids(4), max_new_tokens=3, logprobs=0).logprobs
    assert none is not None
    assert [one.top for one in none] == [()] * 3
    with pytest.raises(InvalidOption, match="logprobs is -1, expected at least 0"):
        model.generate(random_ids(4), logprobs=-1)
    many = model.generate(random_ids(4), max_new_tokens=1, logprobs=10**6).logprobs
    assert many is not None
    assert len(many[0].top) == VOCAB_SIZE


def test_penalties_count_the_answer_alone() -> None:
    penalty = OccurrencePenalty(0.5, 0.25, start=2)
    scores = torch.zeros(1, 6)
    found = penalty(torch.tensor([[1, 2, 3, 3, 4]]), scores)
    assert found.tolist() == [[0.0, 0.0, 0.0, -1.0, -0.75, 0.0]]
    assert scores.eq(0).all()


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
def test_penalties_change_the_answer_and_drafts_do_not(model: Speculator, name: str) -> None:
    def answer(value: float, **drafts: Any) -> Generation:
        asked: Any = {"max_new_tokens": 40, name: value, **drafts}
        return model.generate(random_ids(6), **asked)

    plain, penalised = (answer(value, speculate=False).token_ids for value in (0.0, 4.0))
    assert len({*penalised}) > len({*plain})
    drafted = answer(4.0, drafter="exit:threshold=0.01", never_slower=False)
    assert drafted.token_ids == penalised
    assert drafted.stats.accepted > 0  # drafts are made under the penalty, too
