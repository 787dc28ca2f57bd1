"""Prompts to measure on: a suite's name or a file comes in, questions by task group go out.

Called by every command of evaluation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from selfspec.errors import InvalidData, InvalidOption
from selfspec.typed import check_keys
from selfspec.untrusted import json_lines, parse_json

SIX_TASKS = "six-tasks"
SPEC_BENCH = "spec-bench"
SUITES = (SIX_TASKS, SPEC_BENCH)

TASKS = ("math", "chat", "QA", "RAG", "summary", "translation")
"""The six groups of Spec-Bench, in the order of our tables."""

OVERALL = "overall"
"""What tables call all groups together."""

_MOST_QUESTIONS = 1_000_000
"""Lines of a file; Spec-Bench has 480."""

_CATEGORIES = {
    "math_reasoning": "math",
    "qa": "QA",
    "rag": "RAG",
    "summarization": "summary",
    "translation": "translation",
}
"""Spec-Bench's categories; all others are its multi-turn chat."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """One conversation to be held: the user's turns, each to be answered by the model."""

    id: str
    task: str
    """Task group: math, chat, QA, RAG, summary, translation, or the file's own word."""
    turns: tuple[str, ...]
    """What the user says, at least one turn."""
    reference: str | None = None
    """A good answer to the last turn, where the file has one."""


def load_suite(
    name: str = SIX_TASKS, questions: Path | None = None, limit: int | None = None
) -> list[Question]:
    """The questions of a suite, or of a JSONL file in place of its `name`.

    `questions` is the file of a suite that is not built in. `limit` takes that many, spread evenly
    over the suite, so that all its groups stay represented. Raises InvalidOption for an unknown
    suite, InvalidData for a file that cannot be used.
    """
    return spread(list(_questions(_file(name, questions))), limit)


def spread(questions: Sequence[Question], count: int | None) -> list[Question]:
    """So many of the questions, as far apart as they go; all without a count.

    Raises InvalidOption for a count below 1.
    """
    if count is not None and count < 1:
        raise InvalidOption(f"limit is {count}, expected at least 1")
    if count is None or count >= len(questions):
        return list(questions)
    return [questions[index * len(questions) // count] for index in range(count)]


def groups(questions: Sequence[Question]) -> list[str]:
    """Task groups present: Spec-Bench's six in their order, then the files' own words."""
    present = list(dict.fromkeys(question.task for question in questions))
    return sorted(present, key=lambda task: TASKS.index(task) if task in TASKS else len(TASKS))


def _file(name: str, questions: Path | None) -> Path:
    """Where a suite's lines are."""
    if name not in SUITES and (Path(name).suffix == ".jsonl" or Path(name).is_file()):
        if questions is not None:
            raise InvalidOption(f"{name} and {questions} at once. Leave out --questions")
        return Path(name)
    check_keys([name], SUITES, "suite")
    if name == SPEC_BENCH:
        if questions is None:
            raise InvalidOption("the suite spec-bench is not built in. Give --questions FILE")
        return questions
    if questions is not None:
        raise InvalidOption(f"the suite {name} is built in. Leave out --questions")
    return Path(__file__).with_name("six-tasks.jsonl")


def _questions(file: Path) -> Iterator[Question]:
    """One per line. Raises InvalidData: file, line, reason."""
    seen: set[str] = set()
    for number, line in json_lines(file, most_lines=_MOST_QUESTIONS):
        record = parse_json(line, f"{file}, line {number}")
        try:
            question = _parsed(record, str(number))
            if question.id in seen:
                raise InvalidData(f"has the id {question.id} of an earlier line")
        except InvalidData as error:
            raise InvalidData(f"{file}, line {number} {error}") from error
        seen.add(question.id)
        yield question
    if not seen:
        raise InvalidData(f"{file} holds no questions")


def _parsed(record: Any, number: str) -> Question:
    """A line of any of the formats. Raises InvalidData with the reason alone."""
    if not isinstance(record, dict):
        raise InvalidData(f"holds a {type(record).__name__}, expected an object")
    turns = [record["prompt"]] if "prompt" in record else record.get("turns")
    if not isinstance(turns, list) or not turns:
        raise InvalidData("has neither a prompt nor a list of turns")
    if not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise InvalidData("has a turn that is no text")
    return Question(
        id=_word(record, "id", "question_id") or number,
        task=_task(record),
        turns=tuple(turns),
        reference=_reference(record.get("reference")),
    )


def _task(record: dict[str, Any]) -> str:
    """The group: the file's own word, or that of a Spec-Bench category."""
    if category := _word(record, "category"):
        return _CATEGORIES.get(category, "chat")
    task = _word(record, "task") or "prompts"
    if task == OVERALL:
        raise InvalidData(f"has the task {OVERALL}, which stands for all of them")
    return task


def _word(record: dict[str, Any], *names: str) -> str | None:
    """The first of `names` that there is, as text. Raises InvalidData for anything longer."""
    for name in names:
        value = record.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise InvalidData(f"has {name} {value}, expected text or a whole number")
        return str(value)
    return None


def _reference(value: Any) -> str | None:
    """Text, or of a list that of the last turn; of several good answers the first."""
    if isinstance(value, list):
        last = value[-1] if value else None
        value = last[0] if isinstance(last, list) and last else last
    if value is not None and not isinstance(value, str):
        raise InvalidData("has a reference that is no text")
    return value or None
