"""What a bench may be asked for, on which questions it chooses a setting, and which one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from selfspec.errors import InvalidOption
from selfspec.eval.answers import Answer, Run
from selfspec.eval.bench import chosen, parted
from selfspec.eval.contenders import Contender
from selfspec.eval.options import BenchOptions
from selfspec.eval.suites import Question


def test_the_fastest_setting_that_did_not_fail_is_chosen() -> None:
    def contender(label: str) -> Contender:
        return Contender(label=label, method="m", setting={"of": label})

    grid = {"m": [contender("a"), contender("b"), contender("c")], "plain": [contender("p")]}
    runs = [
        {"a": Run(seconds=5.0), "b": Run(seconds=2.0), "c": Run(seconds=1.0)},
        {"a": Run(seconds=5.0), "b": Run(seconds=3.0), "c": Run(error="no")},
    ]
    tuning = [Answer(id="q", task="t", turn=1, repeat=1, runs=entry) for entry in runs]
    found = chosen(grid, [*tuning, Answer(id="x", task="t", turn=1, repeat=1, error="too long")])
    assert (found["m"].label, found["m"].setting) == ("m", {"of": "b"})
    assert found["plain"].label == "plain"
    assert chosen(grid, [])["m"].setting == {"of": "a"}


def test_settings_are_chosen_on_questions_that_are_not_reported(tmp_path: Path) -> None:
    suite = [Question(id=str(number), task="t", turns=(str(number),)) for number in range(8)]
    options = BenchOptions(tune_questions=2, limit=3)
    assert parted(suite, options, tuning=False) == ([suite[0], suite[2], suite[5]], [])
    reported, others = parted(suite, options, tuning=True)
    assert [question.id for question in others] == ["0", "4"]
    assert [question.id for question in reported] == ["1", "3", "6"]
    file = tmp_path / "others.jsonl"
    file.write_text('{"prompt": "2"}\n{"prompt": "x"}\n')
    options = BenchOptions(tune_on=str(file))
    reported, others = parted(suite, options, tuning=True)
    assert [question.turns for question in others] == [("2",), ("x",)]
    assert [question.id for question in reported] == ["0", "1", "3", "4", "5", "6", "7"]


def test_no_question_left_to_report_is_an_error() -> None:
    suite = [Question(id="a", task="t", turns=("a",))]
    with pytest.raises(InvalidOption, match="Give --tune-on"):
        parted(suite, BenchOptions(), tuning=True)


@pytest.mark.parametrize("name", ["tune_questions", "max_new_tokens", "repeats"])
def test_counts_are_at_least_one(name: str) -> None:
    values: dict[str, Any] = {name: 0}
    with pytest.raises(InvalidOption, match=f"{name} is 0, expected at least 1"):
        BenchOptions(**values)
