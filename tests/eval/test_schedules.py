"""Schedules: one at a time and many at once make the same passes."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec.decoding.schedule import Schedule
from selfspec.eval.schedules import Schedules

NUM_LAYERS, WIDEST = 8, 6


@st.composite
def rounds(draw: st.DrawFn) -> tuple[tuple[int, ...], list[list[int]]]:
    """Exit layers, also the embedding, and of some rounds how far each new row is taken."""
    layers = st.sets(st.integers(0, NUM_LAYERS - 1), max_size=3)
    exit_layers = tuple(sorted(draw(layers)))
    advances = st.lists(st.integers(0, len(exit_layers)), max_size=WIDEST)
    return exit_layers, draw(st.lists(advances, min_size=1, max_size=6))


def one_by_one(exit_layers: tuple[int, ...], reached: list[int]) -> Schedule:
    """Each row is pushed, and taken along with all it meets; then verification."""
    schedule = Schedule(exit_layers, NUM_LAYERS)
    for until in reached:
        schedule.push(1)
        for boundary in range(until):
            schedule.advance(boundary)
    for boundary, until in schedule.finish():
        schedule.advance(boundary, until)
    return schedule


def together(exit_layers: tuple[int, ...], every: list[list[int]]) -> Schedules:
    """The same, a row and a boundary of all rounds at a time."""
    schedules = Schedules(exit_layers, NUM_LAYERS, len(every), WIDEST)
    for row in range(max(map(len, every))):
        places = np.array([place for place, rows in enumerate(every) if row < len(rows)])
        schedules.push(places)
        for boundary in range(len(exit_layers)):
            places = np.array([place for place in places if every[place][row] > boundary], int)
            schedules.advance(places, boundary)
    schedules.finish(np.arange(len(every)))
    return schedules


@settings(max_examples=200)
@given(rounds())
def test_many_at_once_make_the_passes_of_each(
    asked: tuple[tuple[int, ...], list[list[int]]],
) -> None:
    exit_layers, every = asked
    found = together(exit_layers, every)
    for place, reached in enumerate(every):
        schedule = one_by_one(exit_layers, reached)
        assert found.waiting[:, place].tolist() == schedule.waiting
        passes = np.zeros((2, WIDEST), int)
        for rows, first, last in schedule.passes:
            passes[:, rows - 1] += 1, last - first
        assert [found.passes[place].tolist(), found.layers[place].tolist()] == passes.tolist()


@settings(max_examples=200)
@given(rounds())
def test_verification_takes_every_row_through_every_layer_once(
    asked: tuple[tuple[int, ...], list[list[int]]],
) -> None:
    exit_layers, every = asked
    for reached in every:
        schedule = one_by_one(exit_layers, reached)
        assert schedule.waiting == [0] * (len(exit_layers) + 1) + [len(reached)]
        run = sum(rows * (last - first) for rows, first, last in schedule.passes)
        assert run == len(reached) * NUM_LAYERS
        deep = [last for _, _, last in schedule.passes].count(NUM_LAYERS)
        assert deep == bool(reached)  # one pass for all
