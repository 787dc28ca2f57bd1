from __future__ import annotations

from typing import Any

import pytest

from selfspec.errors import InvalidOption
from selfspec.training.options import CacheOptions, DataOptions, FitOptions

WRONG: dict[type, list[tuple[dict[str, Any], str]]] = {
    DataOptions: [
        ({"tokens": 0}, "tokens is 0, expected a value of at least 1"),
        ({"batch_size": 0}, "batch_size is 0, expected a value of at least 1"),
        ({"max_question_tokens": 0}, "max_question_tokens is 0"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_prompt_tokens": 31}, "max_prompt_tokens is 31, expected a value of at least 32"),
        ({"greedy_share": 1.1}, "greedy_share is 1.1"),
        ({"question_temperature": (1.0,)}, r"question_temperature is \(1.0,\), expected"),
        ({"question_temperature": (1.0, 0.9)}, r"question_temperature is \(1.0, 0.9\)"),
        ({"question_temperature": (0.0, 1.0)}, r"question_temperature is \(0.0, 1.0\)"),
        ({"question_top_k": -1}, "question_top_k is -1"),
        ({"temperature": 0.0}, "temperature is 0.0, expected a value above 0"),
        ({"seed": -1}, "seed is -1"),
        ({"raw": True, "system": "a"}, "system is a, expected none with raw"),
        ({"shard": "0/2"}, "shard is 0/2, expected a value I/N with I in 1..N"),
        *(({"shard": text}, f"shard is {text}") for text in ("3/2", "1", "a/b")),
    ],
    CacheOptions: [({n: 0}, f"{n} is 0") for n in ("top_k", "batch_tokens", "max_tokens")],
    FitOptions: [
        (
            {"head_type": "logit-lens"},
            "head_type is logit-lens, expected a value out of linear",
        ),
        ({"ce_share": 1.5}, "ce_share is 1.5, expected a value in"),
        ({"answer_share": 0.0}, "answer_share is 0.0"),
        ({"step_decay": 0.0}, "step_decay is 0.0"),
        ({"inner_size": 0}, "inner_size is 0, expected a value of at least 1"),
        *(({name: 0}, f"{name} is 0") for name in ("epochs", "accumulate", "patience")),
        ({"learning_rate": 0.0}, "learning_rate is 0.0, expected a value above 0"),
        ({"warmup": 1.0}, "warmup is 1.0"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1"),
        ({"max_grad_norm": 0.0}, "max_grad_norm is 0.0"),
    ],
}


@pytest.mark.parametrize(
    ("kind", "values", "reason"), [(kind, *row) for kind, rows in WRONG.items() for row in rows]
)
def test_values_out_of_range_are_refused_by_name(kind: Any, values: Any, reason: str) -> None:
    with pytest.raises(InvalidOption, match=reason):
        kind(**values)


def test_the_bounds_themselves_are_fine() -> None:
    ones = dict.fromkeys(("tokens", "batch_size", "max_question_tokens", "max_new_tokens"), 1)
    least = {"max_prompt_tokens": 32, "greedy_share": 0.0, "question_top_k": 0, "seed": 0}
    found = DataOptions(**ones, **least, question_temperature=(0.5, 0.5), shard="12/12")  # type: ignore[arg-type]  # of several kinds
    assert found.part == (11, 12)
    assert DataOptions(greedy_share=1.0).part == (0, 1)
    FitOptions(ce_share=0.0, answer_share=1.0, step_decay=1.0, warmup=0.0, weight_decay=0.0)
