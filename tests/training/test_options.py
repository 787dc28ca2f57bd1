from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from selfspec.errors import InvalidOption
from selfspec.training.options import CacheOptions, DataOptions, FitOptions

WRONG: dict[type, dict[str, Sequence[Any]]] = {
    DataOptions: {
        **dict.fromkeys(("tokens", "batch_size", "max_question_tokens", "max_new_tokens"), (0,)),
        "max_prompt_tokens": [31],
        "greedy_share": [1.1],
        "question_temperature": [(1.0,), (1.0, 0.9), (0.0, 1.0)],
        "question_top_k": [-1],
        "temperature": [0.0],
        "seed": [-1],
    },
    CacheOptions: dict.fromkeys(("top_k", "batch_tokens", "max_tokens"), (0,)),
    FitOptions: {
        "head_type": ["logit-lens"],
        "ce_share": [1.5],
        **dict.fromkeys(("answer_share", "step_decay", "learning_rate", "max_grad_norm"), (0.0,)),
        **dict.fromkeys(("inner_size", "epochs", "accumulate"), (0,)),
        "warmup": [1.0],
        "weight_decay": [-0.1],
    },
}


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [(k, name, one) for k, row in WRONG.items() for name, values in row.items() for one in values],
)
def test_values_out_of_range_are_refused_by_name(kind: Any, name: str, value: Any) -> None:
    with pytest.raises(InvalidOption, match=f"^{name} is .*, expected a value "):
        kind(**{name: value})


def test_the_bounds_themselves_are_fine() -> None:
    ones = dict.fromkeys(("tokens", "batch_size", "max_question_tokens", "max_new_tokens"), 1)
    least = {"max_prompt_tokens": 32, "greedy_share": 0.0, "question_top_k": 0, "seed": 0}
    DataOptions(**ones, **least, question_temperature=(0.5, 0.5))  # type: ignore[arg-type]  # of several kinds
    DataOptions(greedy_share=1.0)
    FitOptions(ce_share=0.0, answer_share=1.0, step_decay=1.0, warmup=0.0, weight_decay=0.0)
    with pytest.raises(InvalidOption, match="system is a, expected none with raw"):
        DataOptions(raw=True, system="a")
