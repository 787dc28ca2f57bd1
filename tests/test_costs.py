"""Measured costs: medians by an injected clock, and what they say of a pass."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from selfspec.config import SpeculationOptions
from selfspec.decoding.costs import MAX_DRAFT_TOKENS, Costs, measure
from selfspec.heads.exit_heads import ExitHeads, logit_lens
from selfspec.model.backbone import Backbone
from selfspec.options import Prices
from tests.heads.kinds import make_heads

COSTS = Costs(
    num_layers=10,
    layers=(1.0, 1.5),
    start=(0.2, 0.5),
    logits=(0.1, 0.2),
    head=0.01,
    round=0.05,
)


def test_a_plain_step_is_layers_logits_and_bookkeeping() -> None:
    assert COSTS.plain_step() == pytest.approx(1.15)


def test_shares_of_a_plain_step_add_up_to_the_widest_verification() -> None:
    wide = replace(COSTS, layers=(1.0, 1.5, 1.6, 1.7), logits=(0.1, 0.2, 0.23, 0.26))
    step = wide.plain_step()
    assert wide.head_cost * step == pytest.approx(0.01)
    assert wide.row_cost * step == pytest.approx(0.13)
    assert wide.block_cost * step == pytest.approx(0.6 - 0.13)
    assert (wide.block_cost + 3 * wide.row_cost) * step == pytest.approx(0.86)
    # of two rows the second is both
    assert COSTS.row_cost * COSTS.plain_step() == pytest.approx(0.6)
    assert COSTS.block_cost == 0.0


def test_rows_that_cost_nothing_or_too_much_are_within_what_options_allow() -> None:
    flat = replace(COSTS, layers=(1.0, 1.0, 0.9), logits=(0.1, 0.1, 0.1))
    assert (flat.row_cost, flat.block_cost) == (0.0, 0.0)
    dear = replace(COSTS, layers=(1.0, 3.0, 9.0), logits=(0.1, 0.1, 0.1))
    assert dear.row_cost == 1.0
    SpeculationOptions(prices=Prices(row=dear.row_cost, block=dear.block_cost))


@pytest.mark.parametrize(
    ("count", "rows", "seconds"), [(10, 1, 1.0), (10, 2, 1.5), (5, 1, 0.6), (1, 2, 0.6), (0, 2, 0)]
)
def test_a_pass_has_a_start_and_layers_that_all_cost_the_same(
    count: int, rows: int, seconds: float
) -> None:
    assert COSTS.run(count, rows) == pytest.approx(seconds)


@pytest.fixture
def heads(backbone: Backbone) -> ExitHeads:
    return logit_lens(backbone.unembedding, backbone.num_layers, "tiny")


def test_a_clock_that_ticks_once_a_part_makes_all_parts_alike(
    backbone: Backbone, heads: ExitHeads
) -> None:
    clock = itertools.count()
    found = measure(backbone, heads, now=lambda: float(next(clock)))
    ones = (1.0,) * (MAX_DRAFT_TOKENS + 1)
    # a pass of few layers takes as long as one of all: everything is its start; a round takes less
    # than the layers and the logits that it is made of: nothing is left for itself
    assert found == Costs(num_layers=6, layers=ones, start=ones, logits=ones, head=1.0, round=0.0)


def laps(seconds: Callable[[int], float]) -> Iterator[float]:
    """Clock readings in pairs; lap n takes `seconds(n)`."""
    time = 0.0
    for lap in itertools.count():
        yield time
        time += seconds(lap)
        yield time


def test_one_slow_moment_does_not_show(backbone: Backbone, heads: ExitHeads) -> None:
    clock = laps(lambda lap: 100.0 if lap in (3, 20, 31) else 2.0)
    found = measure(backbone, heads, now=lambda: next(clock))
    assert {*found.layers, *found.start, *found.logits, found.head} == {2.0}


def test_heads_that_read_deep_states_are_measured_too(backbone: Backbone) -> None:
    heads = make_heads("deep-fused", backbone.unembedding, exit_layers=(0, 2))
    found = measure(backbone, heads, context=20)
    assert found.head > 0.0
    assert len(found.layers) == len(found.start) == len(found.logits) == MAX_DRAFT_TOKENS + 1
    assert all(
        0.0 <= start <= whole for start, whole in zip(found.start, found.layers, strict=True)
    )
