from __future__ import annotations

from typing import Any

import pytest

from selfspec.errors import InvalidOption
from selfspec.training.options import DataOptions


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"tokens": 0}, "tokens is 0, expected at least 1"),
        ({"batch_size": 0}, "batch_size is 0, expected at least 1"),
        ({"max_question_tokens": 0}, "max_question_tokens is 0"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_prompt_tokens": 31}, "max_prompt_tokens is 31, expected at least 32"),
        ({"greedy_share": 1.1}, "greedy_share is 1.1"),
        ({"question_temperature": (1.0,)}, "question_temperature is 1.0, expected a lowest"),
        ({"question_temperature": (1.0, 0.9)}, "question_temperature is 1.0,0.9"),
        ({"question_temperature": (0.0, 1.0)}, "question_temperature is 0.0,1.0"),
        ({"question_top_k": -1}, "question_top_k is -1"),
        ({"temperature": 0.0}, "temperature is 0.0, expected above 0"),
        ({"seed": -1}, "seed is -1"),
        ({"shard": "0/2"}, "shard is 0/2, expected I/N with I in 1..N"),
        ({"shard": "3/2"}, "shard is 3/2"),
        ({"shard": "1"}, "shard is 1,"),
        ({"shard": "a/b"}, "shard is a/b"),
    ],
)
def test_values_out_of_range_are_refused_by_name(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidOption, match=reason):
        DataOptions(**values)


def test_the_bounds_themselves_are_fine() -> None:
    least = DataOptions(
        tokens=1,
        batch_size=1,
        max_prompt_tokens=32,
        max_question_tokens=1,
        max_new_tokens=1,
        greedy_share=0.0,
        question_temperature=(0.5, 0.5),
        question_top_k=0,
        seed=0,
        shard="12/12",
    )
    assert least.part == (11, 12)
    assert DataOptions(greedy_share=1.0).part == (0, 1)
