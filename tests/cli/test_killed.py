"""Commands that are killed again and again, in the midst of writing, and then called once more.

`data`, `cache` and `fit`, which write for hours, have tests of their own; others write one file.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from selfspec import files
from selfspec.cli.main import main

Capture = pytest.CaptureFixture[str]

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="a child is forked to be killed")

MODEL = ["--model", "model", "--dtype", "float32", "--heads", "heads", "--max-new-tokens", "4"]
COMMANDS = {
    "out.jsonl": ["generate", *MODEL, "--prompts", "suite.jsonl", "--output", "out.jsonl"],
    "results/answers.jsonl": [
        *("bench", *MODEL, "--suite", "suite.jsonl", "--output", "results"),
        *("--resume", "--methods", "plain"),
    ],
}
"""By the file that they write."""


def answers(file: Path) -> list[Any]:
    """Lines without what differs from run to run, in an order of their own."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    kept = ("index", "question", "method", "text", "token_ids")
    return sorted([{name: line.get(name) for name in kept} for line in lines], key=repr)


@pytest.mark.usefixtures("empty_cache")
@pytest.mark.parametrize("output", COMMANDS)
def test_a_command_that_was_killed_gives_what_it_would_have_given(
    output: str, workplace: Path, capsys: Capture
) -> None:
    file, command = workplace / output, COMMANDS[output]
    Path("suite.jsonl").unlink()
    prompts = [json.dumps({"prompt": text}) for text in ("a", "b c", "c a b", "a a b")]
    Path("suite.jsonl").write_text("\n".join(prompts) + "\n")
    assert [killed(command, step) for step in (1, 5)] == [signal.SIGKILL] * 2
    assert main(command) == 0, capsys.readouterr().err
    found = answers(file)
    assert not [path for path in Path().rglob("*.new") if "cache" not in path.parts]
    assert not Path("out.jsonl.partial").exists()
    for path in file.parent.glob("*") if file.parent != workplace else [file]:
        path.unlink()
    assert main(command) == 0, capsys.readouterr().err
    assert answers(file) == found


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
