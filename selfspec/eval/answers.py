"""What `bench` measured, one record per prompt and turn, as lines of a file.

Written by `bench` while it runs; read by it when it goes on, and by `summary` and `plots`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from selfspec import files
from selfspec.errors import InvalidData
from selfspec.eval.quality import Quality
from selfspec.untrusted import json_lines, parse_json, read_bytes

_MOST_BYTES = 1 << 30
"""Of a file of answers: thousands of long ones have a tenth."""

ANSWERS, TUNING = "answers.jsonl", "tuning.jsonl"
"""Files of a results folder: what is reported, and what settings were chosen on."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One method on one prompt."""

    seconds: float = 0.0
    """From the prompt's ids to the last token."""
    arrivals: list[tuple[int, float]] = field(default_factory=list)
    """Tokens that arrived together, and seconds since the ones before (first: since the start).
    The first arrival comes from the prompt's pass, each later one from a verification."""
    equal: bool = False
    """The tokens are those of plain decoding."""
    counts: dict[str, dict[str, float]] = field(default_factory=dict)
    """What our runtime counted: seconds by part; drafts by exit layer and by index, drafted and
    accepted. Empty for Hugging Face."""
    quality: Quality | None = None
    """Of the text that the method writes up to its own end; where it was looked at."""
    error: str | None = None
    """Why there is no answer."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One turn of one question, by all methods."""

    id: str
    task: str
    turn: int
    """From 1."""
    repeat: int
    """From 1."""
    prompt_tokens: int = 0
    new_tokens: int = 0
    """Written by each method: as many as plain decoding writes before it ends."""
    repeated: float = 0.0
    """Share of 8-grams that occurred before in plain decoding's answer."""
    text: str = ""
    """Plain decoding's answer."""
    outside_s: float = 0.0
    """What the harness itself took around the runs: seconds outside the methods' calls."""
    runs: dict[str, Run] = field(default_factory=dict)
    """By contender."""
    error: str | None = None
    """Why nothing could be measured: the prompt itself cannot be run."""

    @property
    def key(self) -> tuple[str, int, int]:
        """What tells it from all others of a file."""
        return self.id, self.turn, self.repeat


def append(path: Path, answer: Answer) -> None:
    """Add one line. Raises CannotWrite."""
    files.append(path, json.dumps(asdict(answer), ensure_ascii=False))


def read(path: Path) -> list[Answer]:
    """All answers of a file; none if there is no file.

    Raises InvalidData for a line that is none, with its number.
    """
    if not path.exists():
        return []
    answers = []
    for number, line in json_lines(path):
        try:
            answers.append(_parsed(parse_json(line, "the line")))
        except (InvalidData, ValueError, TypeError, LookupError, AttributeError) as error:
            raise InvalidData(f"{path}, line {number} is no answer of a bench: {error}") from error
    return answers


def drop_unfinished(path: Path) -> None:
    """Cut off a last line that a killed run left half-written."""
    if not path.exists():
        return
    data = read_bytes(path, _MOST_BYTES)
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        files.write(path, data[:whole])


def failures(answers: Iterable[Answer]) -> list[str]:
    """One line for each answer that is missing: which, by which method, why."""
    lines = []
    for answer in answers:
        place = f"{answer.id}, turn {answer.turn}"
        if answer.error is not None:
            lines.append(f"{place}: {answer.error}")
        lines += [
            f"{place}, {label}: {run.error}"
            for label, run in answer.runs.items()
            if run.error is not None
        ]
    return lines


def _parsed(record: Mapping[str, Any]) -> Answer:
    runs = {label: Run(**_rebuilt(run)) for label, run in record["runs"].items()}
    return Answer(**{**record, "runs": runs})


def _rebuilt(run: Mapping[str, Any]) -> dict[str, Any]:
    """Values as they were before JSON made lists and mappings of them."""
    text = run.get("quality")
    return {
        **run,
        "arrivals": [(count, seconds) for count, seconds in run["arrivals"]],
        "quality": None if text is None else Quality(**text),
    }
