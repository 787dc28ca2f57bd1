"""Options that make no sense for any model are refused where they are made."""

from __future__ import annotations

from typing import Any

import pytest

from selfspec.errors import InvalidOption
from selfspec.eval.options import BenchOptions, RecordOptions, TuneOptions


@pytest.mark.parametrize(
    ("options", "name", "value", "reason"),
    [
        (BenchOptions, "tune_questions", 0, "tune_questions is 0, expected a value of at least 1"),
        (BenchOptions, "max_new_tokens", 0, "max_new_tokens is 0, expected a value of at least 1"),
        (BenchOptions, "repeats", 0, "repeats is 0, expected a value of at least 1"),
        (RecordOptions, "max_new_tokens", 1, "max_new_tokens is 1"),
        (RecordOptions, "max_draft_tokens", 0, "max_draft_tokens is 0"),
        (RecordOptions, "min_threshold", 0.0, "min_threshold is 0.0"),
        (RecordOptions, "anneal_strengths", (0.5, 0.1), "anneal_strengths is (0.5, 0.1)"),
        (RecordOptions, "anneal_strengths", (), "anneal_strengths is ()"),
        (RecordOptions, "anneal_strengths", (-0.1, 0.1), "anneal_strengths is (-0.1, 0.1)"),
        (TuneOptions, "objective", "fast", "unknown objective 'fast'"),
        (TuneOptions, "max_exit_layers", 0, "max_exit_layers is 0"),
        (TuneOptions, "folds", 1, "folds is 1"),
    ],
)
def test_options_out_of_range_are_refused(options: Any, name: str, value: Any, reason: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        options(**{name: value})
    assert reason in str(caught.value)
