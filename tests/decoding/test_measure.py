"""Measured costs: medians by an injected clock."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest

from selfspec.decoding.measure import measure
from selfspec.decoding.prices import Costs
from selfspec.heads.exit_heads import ExitHeads, logit_lens
from selfspec.model.backbone import Backbone
from tests.heads.kinds import make_heads


@pytest.fixture
def heads(backbone: Backbone) -> ExitHeads:
    return logit_lens(backbone.unembedding, backbone.num_layers, "tiny")


def test_a_clock_that_ticks_once_a_part_makes_all_parts_alike(
    backbone: Backbone, heads: ExitHeads
) -> None:
    clock = itertools.count()
    found = measure(backbone, heads, now=lambda: float(next(clock)))
    ones = (1.0,) * 8
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
    assert len(found.layers) == len(found.start) == len(found.logits) == 8
    assert all(
        0.0 <= start <= whole for start, whole in zip(found.start, found.layers, strict=True)
    )
