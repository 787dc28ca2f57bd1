"""Commands that are killed again and again, in the midst of writing, and then called once more.

`data`, `cache` and `fit`, which write for hours, have tests of their own.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from selfspec import files
from selfspec.api import tuned
from selfspec.cli.main import main
from selfspec.heads.exit_heads import HeadsConfig
from tests.training.test_calibrate import FLAT

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="a child is forked to be killed")

MODEL = ["--model", "model", "--dtype", "float32", "--heads", "heads"]
DEATHS = (1, 5)
"""Steps on the disk after which a run is killed, one run after another."""


def answers(file: Path) -> list[Any]:
    """Lines without what differs from run to run, in an order of their own."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    kept = ("index", "question", "method", "text", "token_ids")
    return sorted([{name: line.get(name) for name in kept} for line in lines], key=repr)


def settings() -> Any:
    return [json.loads(file.read_text())["options"] for file in tuned.files()]


SUITE = ["--suite", "suite.jsonl"]
COMMANDS: dict[str, tuple[list[str], Callable[[], Any]]] = {
    "generate": (
        ["generate", *MODEL, "--prompts", "prompts.jsonl", "--output", "out.jsonl"],
        lambda: answers(Path("out.jsonl")),
    ),
    "bench": (
        ["bench", *MODEL, *SUITE, "--output", "results", "--resume", "--methods", "plain"],
        lambda: answers(Path("results/answers.jsonl")),
    ),
    "calibrate": (
        ["calibrate", *MODEL, "--data", "talks.jsonl"],
        lambda: HeadsConfig.read(Path("heads")),
    ),
    "tune": (["tune", *MODEL, *SUITE], settings),
}
SHORT = ["--max-new-tokens", "4"]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_was_killed_gives_what_it_would_have_given(
    name: str,
    workplace: Path,
    empty_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("heads").unlink()
    shutil.copytree("others", "heads")
    prompts = [json.dumps({"prompt": text}) for text in ("a", "b c", "c a b", "a a b")]
    Path("prompts.jsonl").write_text("\n".join(prompts) + "\n")
    monkeypatch.setattr("selfspec.decoding.measure.measure", lambda *_, **__: FLAT)
    command, result = COMMANDS[name]
    if name != "calibrate":
        command = [*command, *SHORT]
    assert killed(command, DEATHS[0]) == signal.SIGKILL
    for step in DEATHS[1:]:
        if killed(command, step) != signal.SIGKILL:
            break
    else:
        assert main(command) == 0, capsys.readouterr().err
    found = result()
    assert not [path for path in Path().rglob("*.new") if "cache" not in path.parts]
    assert not Path("out.jsonl.partial").exists()
    for path in (*Path().glob("out.jsonl"), *Path().glob("results/*")):
        path.unlink()
    assert main(command) == 0, capsys.readouterr().err
    assert result() == found


def killed(command: list[str], step: int) -> int:
    """Run a command in a child that is killed at a step on the disk; the signal that ended it.

    At every other step half of a line is written, if it writes a line.
    """
    child = os.fork()
    if child == 0:
        try:
            _die_at(step)
            os._exit(main(command))
        finally:
            os._exit(99)
    _, status = os.waitpid(child, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def _die_at(step: int) -> None:
    left = [step]

    def before(wrapped: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return wrapped(*arguments, **named)

        return counted

    def half(path: Path, data: bytes) -> Any:
        left[0] -= 1
        if left[0] == 0:
            with path.open("ab", buffering=0) as file:
                file.write(data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return appended(path, data)

    appended = files.appended
    files.appended = half
    for name in ("rename", "replace", "fsync"):
        setattr(os, name, before(getattr(os, name)))
