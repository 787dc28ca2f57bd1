"""Answers of many settings to the same prompts, each free to write its own text.

`bench` compares methods that write the same tokens; lossy rules do not. Comes in: a speculator,
questions and settings by name. Goes out: one record per question and setting, in a file that a
killed run goes on with. Called by the scripts in eval/papers.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eval.papers.prices import RoundCounts, counts
from selfspec import files
from selfspec.api.speculator import Speculator
from selfspec.api.text import encode
from selfspec.errors import InvalidData
from selfspec.eval.results import Question, drop_unfinished
from selfspec.untrusted import json_lines, parse_json

TRIALS = "trials.jsonl"

Advance = Callable[[int, int, str], None]
"""Questions done, of how many, and words."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One answer."""

    id: str
    task: str
    label: str
    """Of the setting."""
    prompt_ids: list[int]
    token_ids: list[int]
    text: str
    lossless: bool
    counts: RoundCounts
    decode_s: float
    """Behind the prompt's pass."""

    @property
    def key(self) -> tuple[str, str]:
        """What tells it from all others of a file."""
        return self.id, self.label


def run(
    speculator: Speculator,
    questions: Sequence[Question],
    settings: Mapping[str, Mapping[str, Any]],
    path: Path,
    advance: Advance,
    seed: int = 0,
) -> list[Trial]:
    """Answers to the first turns under all `settings`, keywords of `generate` by label.

    Per question in random order, so that machine drift hits all alike. What the file `path` holds
    already is not run again; each answer goes there at once.
    """
    drop_unfinished(path)
    found = {trial.key: trial for trial in read(path)}
    missing = [question for question in questions if not _whole(question, settings, found)]
    if missing:
        speculator.generate(missing[0].turns[0], max_new_tokens=8, do_sample=False)  # warm-up
    for number, question in enumerate(questions):
        advance(number, len(questions), question.id)
        labels = list(settings)
        random.Random(f"{seed} {question.id}").shuffle(labels)
        for label in labels:
            if (question.id, label) not in found:
                trial = _tried(speculator, question, label, settings[label])
                _append(path, trial)
                found[trial.key] = trial
    advance(len(questions), len(questions), "")
    return list(found.values())


def by_label(trials: Sequence[Trial], labels: Sequence[str]) -> dict[str, list[Trial]]:
    """In the order of `labels`."""
    return {label: [trial for trial in trials if trial.label == label] for label in labels}


def read(path: Path) -> list[Trial]:
    """All trials of a file; none if there is no file. Raises InvalidData: file, line, reason."""
    if not path.exists():
        return []
    trials = []
    for number, line in json_lines(path):
        try:
            trials.append(_parsed(parse_json(line, "the line")))
        except (InvalidData, ValueError, TypeError, LookupError, AttributeError) as error:
            raise InvalidData(f"{path}, line {number} is no trial: {error}") from error
    return trials


def _tried(
    speculator: Speculator, question: Question, label: str, setting: Mapping[str, Any]
) -> Trial:
    ids = encode(speculator.tokenizer, question.turns[0]).to(speculator.backbone.device)
    answer = speculator.generate(ids, **setting)
    return Trial(
        id=question.id,
        task=question.task,
        label=label,
        prompt_ids=ids[0].tolist(),
        token_ids=answer.token_ids,
        text=answer.text,
        lossless=answer.stats.lossless,
        counts=counts(answer.stats),
        decode_s=answer.stats.decode_s,
    )


def _whole(
    question: Question, settings: Mapping[str, Any], found: Mapping[tuple[str, str], Trial]
) -> bool:
    return all((question.id, label) in found for label in settings)


def _append(path: Path, trial: Trial) -> None:
    files.append(path, json.dumps(asdict(trial)))


def _parsed(record: dict[str, Any]) -> Trial:
    made = record["counts"]
    by_drafts = {int(length): count for length, count in made["by_drafts"].items()}
    return Trial(**{**record, "counts": RoundCounts(**{**made, "by_drafts": by_drafts})})
