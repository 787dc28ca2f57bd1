"""What README tells people to type is run as it stands there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from selfspec.cli.main import main
from tests.api.test_default_model import pytestmark  # noqa: F401  # the same model, the same conditions

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
GUIDE = (ROOT / "training" / "README.md").read_text(encoding="utf-8")


def fenced(language: str, page: str = README) -> list[str]:
    """Contents of a page's blocks in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.DOTALL | re.MULTILINE)


COMMANDS = [
    line
    for block in fenced("sh")
    for line in block.splitlines()
    if not line.startswith("make")  # this very test runs inside of one of those
]


GUIDE_COMMANDS = [
    line.split("#")[0][line.index("selfspec ") :]
    for block in fenced("sh", GUIDE)
    for line in block.replace("\\\n", " ").splitlines()
    if "selfspec " in line
]

BENCH_COMMANDS = [line for line in README.splitlines() if line.startswith("selfspec bench")]


def run(command: list[str]) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_readme_shows_commands() -> None:
    assert len(COMMANDS) >= 8
    assert len(fenced("python")) == 3


@pytest.mark.parametrize("command", [c for c in COMMANDS if "--pinned" not in c])
def test_command_succeeds_and_prints(command: str) -> None:
    assert run(["bash", "-c", command]).strip()


@pytest.mark.parametrize("program", fenced("python"), ids=["facade", "many", "hugging-face"])
def test_program_succeeds_and_prints(program: str) -> None:
    assert run([sys.executable, "-c", program]).strip()


def test_pinned_commands_print_the_same_text() -> None:
    texts = [run(["bash", "-c", c]) for c in COMMANDS if c.startswith("selfspec generate --pinned")]
    assert len(texts) == 3
    assert len(set(texts)) == 1
    assert len(texts[0]) > 40


def test_the_training_guide_shows_commands() -> None:
    assert len(GUIDE_COMMANDS) >= 6


def test_readme_shows_how_to_measure() -> None:
    assert len(BENCH_COMMANDS) >= 4


@pytest.mark.parametrize("command", GUIDE_COMMANDS + BENCH_COMMANDS)
def test_commands_that_take_long_are_understood(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """They would run for hours: this stops behind the flags, at the first thing that is missing."""
    words = shlex.split(command)[1:]
    assert main([*words, "--config", "nowhere.yaml"]) == 2
    assert "nowhere.yaml" in capsys.readouterr().err
