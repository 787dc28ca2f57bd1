"""Trials: every setting on every prompt, in a file that a killed run goes on with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from eval.papers.trials import by_label, read, run
from selfspec.api.speculator import Speculator, wrap
from selfspec.errors import InvalidData
from selfspec.eval.results import Question
from tests.models import make_model
from tests.talks import make_tokenizer

QUESTIONS = [Question(id=name, task="QA", turns=(f"{name} b",)) for name in ("a", "c")]
GREEDY: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
SETTINGS = {
    "plain": {**GREEDY, "speculate": False},
    "drafts": {**GREEDY, "drafter": "draft-model:max_tokens=2"},
}


@pytest.fixture(scope="module")
def speculator() -> Speculator:
    small = make_model("llama", torch.float64, vocab_size=10, num_hidden_layers=2)
    model = make_model("llama", torch.float64, vocab_size=10)
    return wrap(model, make_tokenizer(), draft_model=small)


def ignore(*_: Any) -> None:
    """Of a progress bar."""


def test_all_settings_answer_all_prompts_and_are_read_back(
    speculator: Speculator, tmp_path: Path
) -> None:
    path = tmp_path / "trials.jsonl"
    found = run(speculator, QUESTIONS, SETTINGS, path, ignore)
    assert sorted(trial.key for trial in found) == [
        (name, label) for name in ("a", "c") for label in ("drafts", "plain")
    ]
    assert read(path) == found
    groups = by_label(found, list(SETTINGS))
    assert list(groups) == ["plain", "drafts"]
    for plain, drafted in zip(
        *(sorted(group, key=lambda trial: trial.id) for group in groups.values()), strict=True
    ):
        assert plain.token_ids == drafted.token_ids
        assert plain.counts.drafted == 0
        assert drafted.counts.drafted > 0
        assert plain.prompt_ids == drafted.prompt_ids


def test_a_run_goes_on_where_it_was_killed(
    speculator: Speculator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trials.jsonl"
    whole = run(speculator, QUESTIONS, SETTINGS, path, ignore)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:3]) + lines[3][:20])
    asked: list[Any] = []
    generate = Speculator.generate

    def noted(self: Speculator, prompt: Any, **options: Any) -> Any:
        asked.append(options)
        return generate(self, prompt, **options)

    monkeypatch.setattr(Speculator, "generate", noted)
    again = run(speculator, QUESTIONS, SETTINGS, path, ignore)
    assert len(asked) == 2  # a warm-up, and the one that was lost
    assert [trial.token_ids for trial in again] == [trial.token_ids for trial in whole]
    asked.clear()
    assert run(speculator, QUESTIONS, SETTINGS, path, ignore) == again
    assert asked == []


def test_another_line_is_refused_with_its_number(tmp_path: Path) -> None:
    (tmp_path / "trials.jsonl").write_text('{"id": 1}\n')
    with pytest.raises(InvalidData, match=r"trials\.jsonl, line 1 is no trial"):
        read(tmp_path / "trials.jsonl")
