"""Types of options: what fits an annotation, and how an error says what does not."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from selfspec.config import GenerateOptions, SpeculationOptions
from selfspec.errors import InvalidOption
from selfspec.typed import annotations_of, check_types, described, fits, shown
from tests.models import addressless


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [
        (3, int, True),
        (np.int64(3), int, True),
        (True, int, False),
        (3.0, int, False),
        ("3", int, False),
        (0.5, float, True),
        (1, float, True),
        (np.float32(0.5), float, True),
        (Fraction(1, 2), float, True),
        (True, float, False),
        (float("nan"), float, False),
        (float("inf"), float, False),
        (10**400, float, False),
        (1j, float, False),
        (True, bool, True),
        (1, bool, False),
        ("a", str, True),
        (b"a", str, False),
        (None, int | None, True),
        (None, int, False),
        ([1, 2], tuple[int, ...], True),
        ((1, 2), list[int], True),
        ([1, "2"], list[int], False),
        ("12", list[int], False),
        ([], list[int], True),
        ((5, 1.2), tuple[int, float], True),
        ((5,), tuple[int, float], False),
        ([[1], [2]], list[list[int]], True),
        ([1], list[list[int]], False),
        (len, Callable[[int], int], True),
        (3, Callable[[int], int], False),
        (object(), Any, True),
        ({}, dict[str, int], True),
    ],
    ids=addressless,
)
def test_a_value_fits_its_annotation(value: Any, hint: Any, expected: bool) -> None:
    assert fits(value, hint) == expected


@pytest.mark.parametrize(
    ("hint", "words"),
    [
        (int, "a whole number"),
        (tuple[int, ...] | None, "a list of whole numbers or None"),
        (tuple[int, float], "a list of whole numbers and finite numbers"),
        (Callable[[int], int], "a function"),
        (str | list[str], "text or a list of texts"),
    ],
    ids=addressless,
)
def test_annotations_in_words(hint: Any, words: str) -> None:
    assert described(hint) == words


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize("value", ["x" * 500, "a\nb", Unprintable(), [None] * 900])
def test_a_value_is_shown_on_one_short_line(value: object) -> None:
    assert len(shown(value)) < 70
    assert "\n" not in shown(value)


def test_an_error_names_the_option_and_what_was_expected() -> None:
    with pytest.raises(InvalidOption) as caught:
        check_types({"a": 1, "other": "x", "b": "x"}, {"a": int, "b": float})
    assert str(caught.value) == "b is 'x', expected a finite number"


@pytest.mark.parametrize("options", [SpeculationOptions, GenerateOptions])
def test_every_option_has_a_type_in_words(options: type) -> None:
    for hint in annotations_of(options).values():
        assert described(hint)
        assert "typing." not in described(hint)
