"""What rounds cost: measured seconds of their parts, and shares of a plain step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from selfspec.config import SpeculationOptions
from selfspec.decoding.drafters.base import Draft
from selfspec.decoding.prices import Costs, DraftCost, token_cost
from selfspec.decoding.stats import Round
from selfspec.model.backbone import Backbone
from selfspec.options import Prices
from tests.models import make_model

COSTS = Costs(
    num_layers=10,
    layers=(1.0, 1.5),
    start=(0.2, 0.5),
    logits=(0.1, 0.2),
    head=0.01,
    round=0.05,
)


# Seconds


def test_a_plain_step_is_layers_logits_and_bookkeeping() -> None:
    assert COSTS.plain_step() == pytest.approx(1.15)
    for rows in (1, 2):
        assert COSTS.seconds([(rows, 1, 10)], [(rows, 1)], 0) == pytest.approx(COSTS.step(rows))


def test_shares_of_a_plain_step_add_up_to_the_widest_verification() -> None:
    wide = replace(COSTS, layers=(1.0, 1.5, 1.6, 1.7), logits=(0.1, 0.2, 0.23, 0.26))
    step = wide.plain_step()
    assert wide.head_cost * step == pytest.approx(0.01)
    first, later = wide.row_costs
    assert (first * step, later * step) == pytest.approx((0.6, 0.13))
    assert (first + 2 * later) * step == pytest.approx(0.86)
    (only,) = COSTS.row_costs  # of two rows
    assert only * COSTS.plain_step() == pytest.approx(0.6)


def test_rows_that_cost_nothing_or_too_much_are_within_what_options_allow() -> None:
    flat = replace(COSTS, layers=(1.0, 1.0, 0.9), logits=(0.1, 0.1, 0.1))
    assert flat.row_costs == (0.0, 0.0)
    dear = replace(COSTS, layers=(1.0, 3.0, 9.0), logits=(0.1, 0.1, 0.1))
    assert dear.row_costs == (1.0, 1.0)
    SpeculationOptions(prices=Prices(row=dear.row_costs))


@pytest.mark.parametrize(("layers", "rows", "seconds"), [(10, 1, 1.0), (5, 1, 0.6), (1, 2, 0.6)])
def test_a_pass_has_a_start_and_layers_that_all_cost_the_same(
    layers: int, rows: int, seconds: float
) -> None:
    assert COSTS.seconds([(rows, 1, layers)], [], 0) == pytest.approx(seconds)


def test_counts_may_be_expected_ones_or_arrays() -> None:
    counts = [
        ((2.0, 13.0), (1.0, 10.0), 0.0, 1.0, 3.0),
        ((0.25, 0.5), (0.75, 7.5), 0.5, 0.5, 0.75),
    ]
    one = [
        COSTS.seconds([(1, *first), (2, *second)], [(1, alone), (2, both)], heads)
        for first, second, alone, both, heads in counts
    ]
    assert one[0] == pytest.approx(2 * 0.2 + 13 * 0.08 + 1.5 + 0.2 + 0.05 + 3 * 0.01)
    first, second, alone, both, heads = (np.array(part).T for part in zip(*counts, strict=True))
    found = COSTS.seconds([(1, *first), (2, *second)], [(1, alone), (2, both)], heads)
    assert found == pytest.approx(one)


def test_rounds_cost_their_passes_their_verdicts_and_the_heads_asked() -> None:
    prompt = Round(
        tokens=[1], draft_tokens=[], exit_layers=[], sources=[], kept=[], ended="off", prefill=True
    )
    drafted = Round(
        tokens=[2, 3],
        draft_tokens=[2],
        exit_layers=[3],
        sources=["exit"],
        kept=[0],
        heads=3,
        ended="depth",
        passes=[(1, 0, 3), (1, 0, 3), (1, 3, 6), (2, 3, 10)],
    )
    passes = 3 * 0.2 + 9 * 0.08 + 0.5 + 7 * 0.1
    found = COSTS.seconds_of([prompt, drafted])
    assert found == pytest.approx(passes + 0.2 + 0.05 + 3 * 0.01)
    seen = replace(drafted, sources=["ngram"], exit_layers=[0], heads=0, passes=[(2, 0, 10)])
    assert COSTS.seconds_of([prompt, seen]) == pytest.approx(COSTS.step(2))


# What drafting adds, as a share of a plain step


@pytest.mark.parametrize(
    ("rows", "draft", "cost"),
    [
        ((0.08,), Draft(tokens=[1, 2], exit_layers=[3, 6], heads=3), 9 / 12 + 0.16 + 0.15),
        ((0.08,), Draft(tokens=[1], exit_layers=[3], heads=3), 3 / 12 + 0.08 + 0.15),
        ((0.08,), Draft(heads=2), 0.1),  # a difficult token: all heads and no layers
        ((0.8, 0.1), Draft(), 0.0),
        ((0.8, 0.1), Draft(tokens=[1], sources=["draft-model"]), 0.8),
        ((0.8, 0.1), Draft(tokens=[1] * 3, sources=["draft-model"] * 3), 1.0),
        # text already seen is no cost of heads
        ((0.8, 0.1, 0.2), Draft(tokens=[1] * 3, sources=["ngram"] * 2 + ["exit"], heads=1), 0.25),
    ],
)
def test_a_draft_costs_its_layers_its_rows_and_the_heads_that_were_asked(
    rows: tuple[float, ...], draft: Draft, cost: float
) -> None:
    assert DraftCost(rows=rows, head=0.05, num_layers=12).of(draft) == pytest.approx(cost)


def test_a_draft_model_costs_its_share_of_the_weights() -> None:
    backbone = Backbone(make_model("llama"), executor="generic")
    second = make_model("llama", num_hidden_layers=3)
    share = sum(p.numel() for p in second.parameters()) / sum(
        p.numel() for p in backbone.model.parameters()
    )
    assert 0.5 < share < 1.0
    assert token_cost(Backbone(second, executor="generic"), backbone) == pytest.approx(share)
    wide = Backbone(second.double(), executor="generic")
    assert token_cost(wide, backbone) == pytest.approx(2 * share)
    drafts = Draft(tokens=[1, 2], exit_layers=[0, 0], sources=["draft-model"] * 2)
    assert DraftCost(rows=(0.1,), token=share).of(drafts) == pytest.approx(0.2 + 2 * share)
