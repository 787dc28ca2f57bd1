"""Rounds are counted exactly, and cost what their parts do."""

from __future__ import annotations

import pytest
import torch

from eval.papers.prices import (
    Prices,
    RoundCounts,
    by_drafts,
    counts,
    draft_seconds,
    measured,
    prices,
    total,
)
from selfspec.api.speculator import wrap
from selfspec.decoding.prices import Costs
from selfspec.errors import InvalidOption
from selfspec.model.backbone import Backbone
from tests.models import make_model, random_ids

PRICES = Prices(verify=(10.0, 11.0, 12.0, 13.0), draft=2.0)


def test_rounds_are_told_apart_by_their_drafts() -> None:
    # 9 rounds: 2 without drafts, 3 of one, 4 of three
    assert by_drafts(9, {1: 7, 2: 4, 3: 4}) == {0: 2, 1: 3, 3: 4}
    assert by_drafts(5, {}) == {0: 5}


def test_counts_of_a_generation_are_those_of_its_rounds() -> None:
    model = make_model("llama", torch.float64)
    small = make_model("llama", torch.float64, num_hidden_layers=2)
    speculator = wrap(
        model, draft_model=small, controller="heuristic", drafter="draft-model:max_tokens=2"
    )
    stream = speculator.stream(random_ids(9), max_new_tokens=20)
    found = counts(stream.drain().stats)
    rounds = [entry for entry in stream.rounds if not entry.prefill]
    assert found.rounds == len(rounds)
    assert found.drafted == sum(len(entry.draft_tokens) for entry in rounds)
    assert found.rows == sum(len(entry.draft_tokens) + 1 for entry in rounds)
    assert found.tokens == 19
    assert found.accepted == sum(entry.accepted for entry in rounds)


def test_a_round_costs_its_rows_and_its_drafts() -> None:
    found = RoundCounts(tokens=9, accepted=5, by_drafts={0: 1, 2: 3})
    assert PRICES.seconds(found) == 10 + 3 * (12 + 2 * 2)
    assert PRICES.plain_seconds(9) == 90
    assert PRICES.draft_cost == 0.2
    assert found.steps(1 / 4) == 4 + 6 / 4


def test_counts_add_up() -> None:
    one = RoundCounts(tokens=9, accepted=5, by_drafts={2: 3, 0: 1})
    other = RoundCounts(tokens=4, accepted=2, by_drafts={2: 1, 1: 1})
    assert total([one, other]) == RoundCounts(tokens=13, accepted=7, by_drafts={0: 1, 1: 1, 2: 4})


def test_a_cost_table_becomes_prices() -> None:
    table = Costs(
        num_layers=4, layers=(8.0, 9.0), start=(0.0, 0.0), logits=(1.0, 2.0), head=0.5, round=0.25
    )
    assert prices(table, 3.0) == Prices(verify=(9.25, 11.25), draft=3.0)


def test_the_price_of_a_draft_is_the_median_of_its_runs() -> None:
    clock = iter(range(1000))
    ticks = [
        next(clock) ** 2 for _ in range(60)
    ]  # run i, of which the 0th is left out, takes 4 i + 1
    small = Backbone(make_model("llama", num_hidden_layers=1))
    assert draft_seconds(small, 16, iter(ticks).__next__) == 4 * 8 + 1


def test_prices_are_measured_for_a_draft_model_and_refused_for_deep_exits() -> None:
    model = make_model("llama")
    found = measured(wrap(model, draft_model=make_model("llama", num_hidden_layers=1)), 3)
    assert len(found.verify) == 3
    assert min(*found.verify, found.draft) > 0
    with pytest.raises(InvalidOption, match="heads on the embedding"):
        measured(wrap(model, heads="logit-lens"), 3)
