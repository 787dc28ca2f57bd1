"""Commands and programs of README and docs/: run unchanged, or only parsed.

Blocks of `sh` and `python` are run. Command lines in other blocks, which need a file or an hour,
are parsed but not run.
"""

from __future__ import annotations

import functools
import io
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import selfspec
from selfspec.api import speculator
from selfspec.api.speculator import Speculator
from selfspec.cli.main import app, main, reorder
from selfspec.decoding import engine
from selfspec.decoding.measure import PinnedProbe
from selfspec.hub import models
from selfspec.model.backbone import Backbone
from tests.api.test_default_model import pytestmark  # noqa: F401  # same model and conditions

ROOT = Path(__file__).parents[1]
README, GUIDE = ROOT / "README.md", ROOT / "training" / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]


def fenced(language: str, page: str) -> list[str]:
    """Contents of a page's blocks in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.DOTALL | re.MULTILINE)


def text_of(pages: list[Path]) -> str:
    return "\n".join(page.read_text(encoding="utf-8") for page in pages)


def commands_of(page: str) -> list[str]:
    """Lines that call selfspec, with continued lines joined and prefixes removed."""
    lines = [line.strip() for line in page.replace("\\\n", " ").splitlines()]
    matches = (
        re.match(r"(?:[A-Z_]+=\S+ |accelerate \S.*? -m )*(selfspec .*)", line) for line in lines
    )
    return [match[1] for match in matches if match]


RUN = dict.fromkeys(
    line
    for block in fenced("sh", text_of(PAGES))
    for line in block.splitlines()
    if not line.startswith("make")  # make runs this test
)
"""Each command once."""

READ = dict.fromkeys(
    line
    for page in (re.sub(r"^```(?:sh|py\w*|text)\n.*?^```", "", text_of(PAGES), flags=re.S | re.M),)
    for block in [*fenced("", page), *re.findall(r"(?:^    .*\n)+", page, re.MULTILINE)]
    for line in commands_of(block)
) | dict.fromkeys(line for block in fenced("sh", text_of([GUIDE])) for line in commands_of(block))

PROGRAMS = [
    pytest.param(program, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, program in enumerate(fenced("python", text_of([page])))
]


@pytest.fixture(autouse=True, scope="module")
def read_once() -> Iterator[None]:
    """Let commands share the loaded and packed model, and what is probed of it; none changes it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "load_model", functools.cache(models.load_model))
        patch.setattr(speculator, "Backbone", functools.cache(Backbone))
        patch.setattr(engine, "PinnedProbe", functools.cache(PinnedProbe))
        yield


def run(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Output of a command, run in this process: a new one takes five seconds to start."""
    echo, _, command = command.rpartition(" | ")
    echoed, words = (shlex.split(part, comments=True) for part in (echo, command))
    assert ["selfspec", *(["echo"] if echo else [])] == [words[0], *echoed[:1]]
    with pytest.MonkeyPatch.context() as patch:
        text = " ".join(echoed[1:]) + "\n"
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        code, output = main(words[1:]), capsys.readouterr()
    assert code == 0, output.err
    return output.out


def test_the_pages_have_commands_and_programs() -> None:
    assert len(RUN) >= 8
    assert len(READ) >= 20
    assert len(PROGRAMS) >= 8
    assert sum(line.startswith("selfspec bench") for line in READ) >= 4


@pytest.mark.parametrize("command", [line for line in RUN if "--pinned" not in line])
def test_command_succeeds_and_prints(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command, capsys).strip()


def test_pinned_commands_print_the_same_text(capsys: pytest.CaptureFixture[str]) -> None:
    texts = [run(line, capsys) for line in RUN if "--pinned" in line]
    assert len(texts) == 3
    assert len(set(texts)) == 1
    assert len(texts[0]) > 40


@pytest.mark.parametrize("program", PROGRAMS)
def test_program_runs(program: str, default: Speculator, monkeypatch: pytest.MonkeyPatch) -> None:
    load = selfspec.load
    monkeypatch.setattr(selfspec, "load", lambda *a, **k: load(*a, **k) if a or k else default)
    exec(compile(program, "page", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("command", READ)
def test_a_command_that_is_not_run_can_be_parsed(command: str) -> None:
    words = reorder(shlex.split(command, comments=True)[1:])
    parser = app()
    context = parser.make_context("selfspec", [*words])
    while hasattr(parser, "commands"):
        name, parser, words = parser.resolve_command(context, words)
    parser.make_context(name, words)
