"""Tables of many texts at once."""

from __future__ import annotations

import pytest

from selfspec.eval.concurrency import Load, table


def load(method: str, texts: int, repeat: int, rate: float, **more: object) -> Load:
    """`rate` tokens per second behind the prompts, half as many with them."""
    made = Load(method=method, texts=texts, repeat=repeat, seconds=2.0, tokens=int(rate), same=3)
    made.steps_s, made.steps_tokens = 1.0, int(rate)
    for name, value in more.items():
        setattr(made, name, value)
    return made


def rows_of(loads: list[Load]) -> list[dict[str, str]]:
    head, _, *rows = (line[1:-1].split("|") for line in table(loads).splitlines())
    return [dict(zip(map(str.strip, head), map(str.strip, row), strict=True)) for row in rows]


def test_a_table_has_medians_and_a_ratio_to_plain_by_repeat() -> None:
    rates = {"plain": (100, 120, 80), "default": (150, 180, 120)}
    loads = [
        load(method, texts, repeat, rate * texts, first_s=[1.0, 2.0])
        for method, some in rates.items()
        for texts in (1, 4)
        for repeat, rate in enumerate(some)
    ]
    rows = rows_of(loads)
    assert [
        (row["method"], row["texts"], row["tokens/s"], row["behind prompts"]) for row in rows
    ] == [
        *(("plain", "1", "50.0", "100.0"), ("plain", "4", "200.0", "400.0")),
        *(("default", "1", "75.0", "150.0"), ("default", "4", "300.0", "600.0")),
    ]
    against = [row["against plain (95 %)"] for row in rows]
    assert against == ["", "", *["1.50 (1.50 to 1.50)"] * 2]
    assert {(row["first, ms: p50"], row["first, ms: p95"]) for row in rows} == {
        ("1500.0", "2000.0")
    }
    assert {row["as alone"] for row in rows} == {"3"}
    assert not any(name.startswith("gaps") for name in rows[0])  # nobody measured them


def test_what_was_not_measured_stays_empty() -> None:
    unseen = load("hugging-face-continuous", 2, 0, 10, steps_tokens=0, gaps_s=[])
    plain, other = rows_of([load("plain", 1, 0, 10, gaps_s=[0.5, 0.1, 0.2], same=2), unseen])
    assert (plain["behind prompts"], other["behind prompts"]) == ("10.0", "")
    assert (plain["gaps, ms: p50"], plain["gaps, ms: p95"]) == ("200.0", "470.0")
    assert other["gaps, ms: p50"] == ""
    assert "against plain (95 %)" not in plain  # measured once, there is no interval


@pytest.mark.parametrize("steps", [0, 30])
def test_a_summary_has_figures_and_no_lists(steps: int) -> None:
    found = load("plain", 1, 0, 10, first_s=[0.1, 0.3], steps_tokens=steps).summary()
    assert found["first_s"] == pytest.approx([0.2, 0.29])
    assert found["gaps_s"] is None
    assert found["decode_tokens_per_s"] == (steps or None)
