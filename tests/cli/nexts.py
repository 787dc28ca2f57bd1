"""The commands that a training step says at its end."""

from __future__ import annotations

import shlex

import pytest

from selfspec.cli.main import main


def nexts(said: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Those in what a step said; all their flags are understood."""
    found = [line.removeprefix("next: ") for line in said.splitlines() if line[:6] == "next: "]
    for command in found:
        assert main([*shlex.split(command)[1:], "--config", "nowhere.yaml"]) == 2
        assert "nowhere.yaml" in capsys.readouterr().err
    return found
