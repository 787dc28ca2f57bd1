"""Works timed in turns, by an injected clock."""

from __future__ import annotations

import torch

from selfspec.decoding.measure import Clock

CPU = torch.device("cpu")


def test_works_are_timed_in_turns_and_the_first_time_does_not_count() -> None:
    time, order = iter([0, 50, 100, 130, 200, 201, 300, 304, 400, 403, 500, 505]), []
    clock = Clock(CPU, 2, lambda: float(next(time)))
    works = {name: (lambda name=name: order.append(name)) for name in ("a", "b")}
    assert clock.laps(works) == {"a": [1.0, 3.0], "b": [4.0, 5.0]}
    assert order == ["a", "b"] * 3


def test_seconds_are_medians() -> None:
    time = iter([0, 1, 10, 17, 20, 22, 30, 33])
    assert Clock(CPU, 3, lambda: float(next(time))).seconds({"a": lambda: None}) == {"a": 3.0}
