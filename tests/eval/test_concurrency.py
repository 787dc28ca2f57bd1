"""Tables of many texts at once."""

from __future__ import annotations

import re

import pytest

from selfspec.eval.concurrency import Load, table


def load(method: str, texts: int, repeat: int, rate: float, **more: object) -> Load:
    """`rate` tokens per second behind the prompts, half as many with them."""
    made = Load(method=method, texts=texts, repeat=repeat, seconds=2.0, tokens=int(rate), same=3)
    made.steps_s, made.steps_tokens = 1.0, int(rate)
    for name, value in more.items():
        setattr(made, name, value)
    return made


def squeezed(loads: list[Load]) -> str:
    return re.sub(" +", " ", table(loads))


def test_a_table_has_medians_and_a_ratio_to_plain_by_repeat() -> None:
    rates = {"plain": (100, 120, 80), "default": (150, 180, 120)}
    loads = [
        load(method, texts, repeat, rate * texts)
        for method, some in rates.items()
        for texts in (1, 4)
        for repeat, rate in enumerate(some)
    ]
    lines = squeezed(loads).splitlines()
    assert "| tokens/s, prompts included | 1 | 4 |" in lines
    assert "| plain | 50 | 200 |" in lines
    assert "| default | 150 | 600 |" in lines
    assert "| default | 1.50 (1.50 to 1.50) | 1.50 (1.50 to 1.50) |" in lines
    assert not any(line.startswith("| plain | 1.00") for line in lines)


def test_what_was_not_measured_stays_empty() -> None:
    unseen = load("hugging-face-continuous", 2, 0, 10, steps_tokens=0, gaps_s=[])
    text = squeezed([load("plain", 1, 0, 10, gaps_s=[0.5, 0.1, 0.2], same=2), unseen])
    assert "| plain | 10 | |" in text
    assert "| hugging-face-continuous | | |" in text
    assert "| plain | 0.200 / 0.470 | |" in text
    assert "against plain" not in text  # measured once, there is no interval


@pytest.mark.parametrize("steps", [0, 30])
def test_a_summary_has_figures_and_no_lists(steps: int) -> None:
    found = load("plain", 1, 0, 10, first_s=[0.1, 0.3], steps_tokens=steps).summary()
    assert found["first_s"] == pytest.approx([0.2, 0.29])
    assert found["gaps_s"] is None
    assert found["decode_tokens_per_s"] == (steps or None)
