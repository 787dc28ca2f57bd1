"""Suites of prompts: what is built in, what files may look like, what is refused."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from selfspec.errors import InvalidData, InvalidOption
from selfspec.eval.suites import TASKS, Question, groups, load_suite


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "questions.jsonl"


def write(file: Path, *records: Any) -> str:
    """One JSON line each; its name."""
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(file)


def test_the_built_in_suite_has_eight_questions_of_each_task() -> None:
    suite = load_suite("six-tasks")
    assert Counter(question.task for question in suite) == dict.fromkeys(TASKS, 8)
    assert len({turn for question in suite for turn in question.turns}) == 48 + 8
    assert all(len(q.turns) == (2 if q.task == "chat" else 1) for q in suite)
    assert all(q.reference for q in suite if q.task != "chat")


def test_a_limit_is_spread_over_all_groups() -> None:
    few = load_suite("six-tasks", limit=6)
    assert [question.task for question in few] == list(TASKS)
    spread = [question.id for question in load_suite("six-tasks", limit=4)]
    assert spread == ["math-1", "chat-5", "rag-1", "summary-5"]
    assert len(load_suite("six-tasks", limit=1000)) == 48


def test_spec_benchs_categories_are_six_groups(file: Path) -> None:
    lines = [
        {"question_id": 81, "category": "writing", "turns": ["a", "b"], "reference": ["", "good"]},
        {"question_id": 305, "category": "rag", "turns": ["c"], "reference": [["x", "y"]]},
        {"question_id": 7, "category": "math_reasoning", "turns": ["d"], "reference": [""]},
    ]
    write(file, *lines)
    assert load_suite("spec-bench", file) == [
        Question(id="81", task="chat", turns=("a", "b"), reference="good"),
        Question(id="305", task="RAG", turns=("c",), reference="x"),
        Question(id="7", task="math", turns=("d",)),
    ]


def test_any_file_of_prompts_is_a_suite(file: Path) -> None:
    name = write(file, {"prompt": "a"}, {"turns": ["b", "c"], "id": "two", "task": "law"})
    assert load_suite(name) == [
        Question(id="1", task="prompts", turns=("a",)),
        Question(id="two", task="law", turns=("b", "c")),
    ]


def test_groups_come_in_the_order_of_the_tables() -> None:
    tasks = ("law", "translation", "math", "law", "QA")
    suite = [Question(id="", task=task, turns=("a",)) for task in tasks]
    assert groups(suite) == ["math", "QA", "translation", "law"]


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        ("{", "is not JSON"),
        ("[1]", "holds a list, expected an object"),
        ("{}", "has neither a prompt nor a list of turns"),
        ('{"turns": []}', "has neither a prompt nor a list of turns"),
        ('{"turns": ["a", " "]}', "has a turn that is no text"),
        ('{"prompt": 3}', "has a turn that is no text"),
        ('{"prompt": "b", "id": "1"}', "has the id 1 of an earlier line"),
        ('{"prompt": "b", "id": [1]}', "has id [1], expected text or a whole number"),
        ('{"prompt": "b", "task": "overall"}', "has the task overall, which stands for all"),
        ('{"prompt": "b", "reference": 3}', "has a reference that is no text"),
    ],
)
def test_a_broken_line_is_named_with_its_reason(file: Path, second: str, reason: str) -> None:
    file.write_text('{"prompt": "a"}\n' + second + "\n", encoding="utf-8")
    with pytest.raises(InvalidData, match=r"questions\.jsonl, line 2 ") as error:
        load_suite(str(file))
    assert reason in str(error.value)


def test_files_that_cannot_be_read_are_named(file: Path) -> None:
    with pytest.raises(InvalidData, match=r"cannot read .*questions\.jsonl: No such file"):
        load_suite("spec-bench", file)
    file.write_bytes(b"\xff")
    with pytest.raises(InvalidData, match="is not UTF-8"):
        load_suite(str(file))
    file.write_text("\n")
    with pytest.raises(InvalidData, match="holds no questions"):
        load_suite(str(file))


@pytest.mark.parametrize(
    ("name", "questions", "reason"),
    [
        ("six-task", None, "unknown suite 'six-task'. Did you mean six-tasks?"),
        ("spec-bench", None, "Give --questions FILE"),
        ("six-tasks", Path("a.jsonl"), "Leave out --questions"),
        ("b.jsonl", Path("a.jsonl"), "Leave out --questions"),
    ],
)
def test_a_wrong_choice_says_what_to_do(name: str, questions: Path | None, reason: str) -> None:
    with pytest.raises(InvalidOption) as error:
        load_suite(name, questions)
    assert reason in str(error.value)


def test_a_limit_takes_at_least_one() -> None:
    with pytest.raises(InvalidOption, match="limit is 0, expected at least 1"):
        load_suite("six-tasks", limit=0)
