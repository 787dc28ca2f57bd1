"""Draft controllers, against runs worked by hand from the formulas of their papers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from selfspec.config import SpeculationOptions
from selfspec.decoding.drafters.base import DraftController, make_controller
from selfspec.options import CONTROLLERS, Exit


def lengths(controller: DraftController, kept: list[int | tuple[int, int]]) -> list[int]:
    """W_max of each round and of the next; `kept`: accepted, or (drafted, accepted)."""
    widths = [controller.begin()]
    for entry in kept:
        drafted, accepted = entry if isinstance(entry, tuple) else (widths[-1], entry)
        controller.end(drafted, accepted)
        widths.append(controller.begin())
    return widths


def confident(controller: DraftController, room: int, confidences: list[float]) -> int:
    """Tokens drafted in a round with room for `room`, whose tokens have these confidences."""
    for count, confidence in enumerate(confidences, start=1):
        if count == room or not controller.go_on(confidence):
            return count
    raise AssertionError("the round went on")


def made(said: str, length: int) -> DraftController:
    """A controller with lengths from 1 to 10 unless `said` sets others."""
    return make_controller(SpeculationOptions().updated({"controller": said}), length)


@pytest.mark.parametrize(
    ("said", "length", "kept", "expected"),
    [
        ("fixed", 4, [4, 0, 2], [4, 4, 4, 4]),
        ("heuristic", 5, [5, 7, 3, 0, 7], [5, 7, 9, 8, 7, 9]),
        ("heuristic:longest=6", 5, [5, 6], [5, 6, 6]),
        ("heuristic", 2, [0, 0], [2, 1, 1]),
        ("heuristic", 5, [(2, 2)], [5, 7]),  # ended early and kept: success
        ("gammatune:rate=0.5", 6, [(2, 2)], [6, 5]),  # (1 - 0.5) 6 + 0.5 (2 + 2) = 5
        ("gammatune:rate=0.5,step=0", 6, [(2, 2)], [6, 4]),
        # all 4 kept: a = 6, mean 5;  2 of 5: mean 3.5, up to 4;  0 of 4: mean 1.75, up to 2;
        # all 2 kept: a = 4, mean 2.875, up to 3
        ("gammatune:rate=0.5", 4, [4, 2, 0, 2], [4, 5, 4, 2, 3]),
        # means 3.5, 2.45, 1.715; from the rounded lengths the last would be 0.7 * 3 = 2.1, up to 3
        ("gammatune", 5, [0, 0, 0], [5, 4, 3, 2]),
        ("gammatune:rate=1", 10, [10, 0, 1], [10, 10, 1, 3]),  # leaves a bound at once
        ("gammatune", 24, [], [10]),
        ("gammatune:shortest=3", 1, [0], [3, 3]),
    ],
)
def test_lengths_of_rounds_by_hand(
    said: str, length: int, kept: list[int | tuple[int, int]], expected: list[int]
) -> None:
    assert lengths(made(said, length), kept) == expected


@pytest.mark.parametrize(
    ("said", "length", "confidences", "drafted"),
    [
        ("fixed", 3, [0.0, 0.0, 0.0], 3),
        ("threshold", 5, [0.9, 0.4, 0.39, 0.9], 3),
        ("threshold:threshold=0.95", 5, [0.9], 1),
        ("threshold", 2, [0.9, 0.9], 2),
        ("gammatune", 4, [0.9, 0.3, 0.9, 0.9], 4),
        ("gammatune-plus", 4, [0.9, 0.3, 0.9, 0.9], 2),
        ("gammatune-plus:threshold=0.95", 4, [0.9], 1),
        ("cm-asd:shortest=2", 4, [1.0] * 10, 10),
        # k after each token: always floor(0.5 * 10)
        ("cm-asd:shortest=2", 4, [0.5] * 10, 5),
        # k: 9, floor(10 * 0.55) = 5, floor(10 * 0.4333) = 4, floor(10 * 0.35) = 3 < 4 drafted
        ("cm-asd:shortest=2", 4, [0.9, 0.2, 0.2, 0.1, 0.9], 4),
        ("cm-asd:shortest=2", 4, [0.05, 0.0], 2),
        ("cm-asd:scale=0.5", 4, [1.0] * 10, 5),
        ("cm-asd:scale=0.5", 4, [0.2] * 10, 1),
    ],
)
def test_a_round_continues_while_its_tokens_are_confident_enough(
    said: str, length: int, confidences: list[float], drafted: int
) -> None:
    controller = made(said, length)
    for _ in range(2):  # no state is left from the previous round
        assert confident(controller, controller.begin(), confidences) == drafted


@pytest.mark.parametrize("name", CONTROLLERS)
def test_no_controller_leaves_its_bounds(name: str) -> None:
    bounds = {"shortest": 2, "longest": 6} if name not in ("fixed", "threshold") else {}
    options = SpeculationOptions(exit=Exit(max_tokens=4), pinned=True, pinned_rows=6)
    controller = make_controller(options.updated({"controller": {name: bounds}}), 4)
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        length = controller.begin()
        assert 2 <= length <= 5  # a pinned pass has 6 rows, one of them the newest token's
        drafted = confident(controller, length, torch.rand(5, generator=generator).tolist())
        controller.end(drafted, int(torch.randint(drafted + 1, (), generator=generator)))


def test_options_of_the_ensemble_reach_the_signal() -> None:
    law = torch.tensor([[2.0, 1.0, 0.0]])

    def confidence(**values: object) -> float:
        options = SpeculationOptions().updated({"controller": {"cm-asd": values}})
        signal: Any = make_controller(options, 4).signal
        return float(signal(law))

    assert len({confidence(), confidence(margin_scale=3.0)}) == 2
    assert confidence() != confidence(weights=(1.0, 0.0, 0.0))
