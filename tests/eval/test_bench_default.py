"""`selfspec bench` on the default model and its heads: every method does its work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from selfspec.cli.main import main
from tests.api.test_default_model import pytestmark  # noqa: F401  # the same model, the same conditions

METHODS = "hugging-face,plain,speculation,no-width-bound,prompt-lookup"


def test_one_question_by_five_methods(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "What is rain?"}\n{"prompt": "Say yes, yes, yes."}\n')
    command = ["bench", "--suite", str(prompts), "--json"]
    command += ["--limit", "1", "--tune-questions", "1", "--max-new-tokens", "4"]
    assert main([*command, "--methods", METHODS, "--output", str(tmp_path / "out")]) == 0
    summary = json.loads(capsys.readouterr().out)
    figures = summary["all"]["overall"]
    assert list(figures) == METHODS.split(",")
    for label in ("plain", "speculation", "no-width-bound"):
        assert summary["unequal"][label] == 0  # compiled code rounds a row alike beside any other
    assert figures["plain"]["compression_rate"] == 1.0
    assert figures["speculation"]["over_plain"]["prompts"] == 1
