"""Draft controllers, against runs worked by hand from their documents' formulas."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from selfspec.config import SpeculationOptions
from selfspec.decoding.drafters.base import (
    Bounds,
    CmAsdLength,
    DraftController,
    GammaTune,
    Heuristic,
    make_controller,
)
from selfspec.options import CONTROLLERS, Exit

BOUNDS = Bounds(1, 10)


def lengths(controller: DraftController, kept: list[int | tuple[int, int]]) -> list[int]:
    """W_max of each round, the last one behind the list; kept: accepted, or (drafted, accepted)."""
    found = [controller.begin()]
    for entry in kept:
        drafted, accepted = entry if isinstance(entry, tuple) else (found[-1], entry)
        controller.end(drafted, accepted)
        found.append(controller.begin())
    return found


def confident(controller: DraftController, confidences: list[float]) -> int:
    """Tokens drafted in a round whose tokens have these confidences."""
    room = controller.begin()
    for count, confidence in enumerate(confidences, start=1):
        if count == room or not controller.go_on(confidence):
            return count
    raise AssertionError("the round went on")


@pytest.mark.parametrize(
    ("controller", "kept", "expected"),
    [
        (DraftController(4), [4, 0, 2], [4, 4, 4, 4]),
        (DraftController(5, 0.4), [5, 0], [5, 5, 5]),
        (Heuristic(5, BOUNDS), [5, 7, 3, 0, 7], [5, 7, 9, 8, 7, 9]),
        (Heuristic(9, BOUNDS), [9, 10], [9, 10, 10]),
        (Heuristic(2, BOUNDS), [0, 0], [2, 1, 1]),
        (Heuristic(5, BOUNDS), [(2, 2)], [5, 7]),  # ended early and kept: success
        (GammaTune(6, BOUNDS, 0.5, 2.0), [(2, 2)], [6, 5]),  # (1 - 0.5) 6 + 0.5 (2 + 2) = 5
        # all 4 kept: a = 6, mean 5;  2 of 5: mean 3.5, up to 4;  0 of 4: mean 1.75, up to 2;
        # all 2 kept: a = 4, mean 2.875, up to 3
        (GammaTune(4, BOUNDS, 0.5, 2.0), [4, 2, 0, 2], [4, 5, 4, 2, 3]),
        (GammaTune(4, BOUNDS, 0.5, 2.0, 0.4), [4, 2, 0, 2], [4, 5, 4, 2, 3]),
        # means 3.5, 2.45, 1.715; from the rounded lengths the last would be 0.7 * 3 = 2.1, up to 3
        (GammaTune(5, BOUNDS, 0.3, 2.0), [0, 0, 0], [5, 4, 3, 2]),
        (GammaTune(10, BOUNDS, 1.0, 2.0), [10, 0, 1], [10, 10, 1, 3]),  # back from a bound at once
        (GammaTune(24, BOUNDS, 0.3, 2.0), [], [10]),
        (GammaTune(1, Bounds(3, 10), 0.3, 2.0), [0], [3, 3]),
    ],
)
def test_lengths_of_rounds_by_hand(
    controller: DraftController, kept: list[int | tuple[int, int]], expected: list[int]
) -> None:
    assert lengths(controller, kept) == expected


def cm_asd(bounds: Bounds, scale: float) -> CmAsdLength:
    return CmAsdLength(bounds, scale, lambda law: law)


@pytest.mark.parametrize(
    ("controller", "confidences", "drafted"),
    [
        (DraftController(3), [0.0, 0.0, 0.0], 3),
        (DraftController(5, 0.4), [0.9, 0.4, 0.39, 0.9], 3),
        (DraftController(2, 0.4), [0.9, 0.9], 2),
        (GammaTune(4, BOUNDS, 0.5, 2.0), [0.9, 0.3, 0.9, 0.9], 4),
        (GammaTune(4, BOUNDS, 0.5, 2.0, 0.4), [0.9, 0.3, 0.9, 0.9], 2),
        (cm_asd(Bounds(2, 10), 1.0), [1.0] * 10, 10),
        (cm_asd(Bounds(2, 10), 1.0), [0.5] * 10, 5),  # k after each: floor(0.5 * 10) all along
        # k: 9, floor(10 * 0.55) = 5, floor(10 * 0.4333) = 4, floor(10 * 0.35) = 3 < 4 drafted
        (cm_asd(Bounds(2, 10), 1.0), [0.9, 0.2, 0.2, 0.1, 0.9], 4),
        (cm_asd(Bounds(2, 10), 1.0), [0.05, 0.0], 2),
        (cm_asd(BOUNDS, 0.5), [1.0] * 10, 5),
        (cm_asd(BOUNDS, 0.5), [0.2] * 10, 1),
    ],
)
def test_a_round_goes_on_while_its_tokens_are_sure_enough(
    controller: DraftController, confidences: list[float], drafted: int
) -> None:
    for _ in range(2):  # nothing is left of the round before
        assert confident(controller, confidences) == drafted


@pytest.mark.parametrize("name", CONTROLLERS)
def test_no_controller_leaves_its_bounds(name: str) -> None:
    bounds = {"shortest": 2, "longest": 6} if name not in ("fixed", "threshold") else {}
    options = SpeculationOptions(exit=Exit(max_tokens=4), pinned=True, pinned_rows=6)
    controller = make_controller(options.updated({"controller": {name: bounds}}), 4)
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        length = controller.begin()
        assert 2 <= length <= 5  # a pinned pass has 6 rows, one of them the newest token's
        drafted = next(
            count
            for count in itertools.count(1)
            if count == length or not controller.go_on(float(torch.rand((), generator=generator)))
        )
        controller.end(drafted, int(torch.randint(drafted + 1, (), generator=generator)))


@pytest.mark.parametrize(
    ("option", "value", "name"),
    [
        ("threshold", 0.8, "threshold"),
        ("threshold", 0.8, "gammatune-plus"),
        ("rate", 0.9, "gammatune"),
        ("step", 5.0, "gammatune"),
        ("shortest", 6, "heuristic"),
        ("longest", 4, "cm-asd"),
        ("scale", 0.5, "cm-asd"),
    ],
)
def test_every_option_changes_its_controller(option: str, value: float, name: str) -> None:
    def played(options: SpeculationOptions) -> list[int]:
        controller = make_controller(options, 4)
        found = []
        for kept in (True, True, False, False, False, False):
            room = controller.begin()
            drafted = next(n for n in range(1, 99) if n == room or not controller.go_on(0.7))
            controller.end(drafted, drafted if kept else 0)
            found.append(drafted)
        return found

    options = SpeculationOptions().updated({"controller": name})
    assert played(options) != played(options.updated({"controller": {name: {option: value}}}))


def test_options_of_the_ensemble_reach_the_signal() -> None:
    law = torch.tensor([[2.0, 1.0, 0.0]])

    def confidence(**values: object) -> float:
        options = SpeculationOptions().updated({"controller": {"cm-asd": values}})
        signal: Any = make_controller(options, 4).signal
        return float(signal(law))

    assert len({confidence(), confidence(margin_scale=3.0)}) == 2
    assert confidence() != confidence(weights=(1.0, 0.0, 0.0))
