"""The way of training/README.md, from a bare clone: no command reads what none before it wrote."""

from __future__ import annotations

import itertools
import re
import shlex
from pathlib import Path

import pytest

from selfspec.cli.main import main
from selfspec.heads.exit_heads import HeadsConfig
from tests.authors import RECIPE
from tests.talks import WORDS, save_tiny

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "training" / "README.md").read_text(encoding="utf-8")
COMMANDS = [
    shlex.split(line, comments=True)
    for block in re.findall(r"^```sh\n(.*?)^```", GUIDE, re.DOTALL | re.MULTILINE)
    for line in block.replace("\\\n", " ").splitlines()
]
WRITTEN = ("--output", ">")
READ = ("--data", "--cache", "--validation", "--heads", "--draft-model", "--config")
SMALL = {
    "batch_size": "6",
    "max_new_tokens": "20",
    "max_question_tokens": "12",
    "question_temperature": "4,6",
    "recipe": "recipe.yaml",
    "draft_vocab_size": "10",
    "exit_layers": "2,4",
    "batch_tokens": "64",
    "epochs": "1",
}
"""What makes the commands small; as variables, so that their words stay as they are."""


def test_every_file_that_is_read_was_written_before_or_is_in_the_repository() -> None:
    assert len(COMMANDS) >= 12
    written: set[str] = set()
    for words in COMMANDS:
        for flag, name in itertools.pairwise(words):
            if flag in READ:
                assert name in written or (ROOT / name).is_file(), f"{' '.join(words)}: {name}"
        written |= {name for flag, name in itertools.pairwise(words) if flag in WRITTEN}


def test_the_first_commands_lead_to_calibrated_heads_that_are_used_by_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny(tmp_path / "MODEL", vocab_size=len(WORDS))
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    for name, value in SMALL.items():
        monkeypatch.setenv(f"SELFSPEC_{name.upper()}", value)
    steps = COMMANDS[1:6]  # behind `adapt`, which tests/test_adaptation.py runs
    names = ["data", "fit", "data", "calibrate", "generate"]
    assert [words[1] for words in steps] == names
    for program, *words in steps:
        small = ["40" if word.isdigit() and len(word) > 3 else word for word in words]
        assert program == "selfspec"
        assert main(small) == 0, " ".join(words)
    found = HeadsConfig.read(tmp_path / "heads")
    assert found.temperatures.keys() == {"2", "4"}
    capsys.readouterr()
    assert main(["generate", "--model", "MODEL", "a"]) == 0
    assert f"exit heads {tmp_path / 'heads'} fit this model" in capsys.readouterr().err
