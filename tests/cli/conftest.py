"""Fixtures of the CLI tests: a fake Speculator, standard input, a restored log, a folder."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from selfspec.cli import base
from selfspec.cli.base import Args
from selfspec.cli.main import main
from selfspec.model.backbone import Backbone
from tests.cli.fakes import Call, FakeSpeculator, link_all
from tests.heads.kinds import make_heads, train
from tests.talks import WORDS, save_tiny, talk_lines


@pytest.fixture(autouse=True)
def quiet_afterwards() -> Iterator[None]:
    """Remove the log handler that a command adds: it writes to this test's standard error."""
    logger = logging.getLogger("selfspec")
    handlers, level = list(logger.handlers), logger.level
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    """Run a command, check its exit code (default 0) and return its output.

    Standard input holds `given`. None leaves it unchanged.
    """

    def called(arguments: list[str], code: int = 0, *, given: bytes | None = b"") -> Any:
        if given is not None:
            stdin = io.TextIOWrapper(io.BytesIO(given), encoding="utf-8")
            monkeypatch.setattr(sys, "stdin", stdin)
        status, output = main(arguments), capsys.readouterr()
        assert status == code, output.err
        return output

    return called


@pytest.fixture
def speculator(monkeypatch: pytest.MonkeyPatch) -> FakeSpeculator:
    """The speculator that every command loads. `loaded` holds the arguments of that call."""
    fake = FakeSpeculator()

    def load(options: Args) -> FakeSpeculator:
        fake.loaded = options
        return fake

    monkeypatch.setattr(base, "load", load)
    return fake


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory, backbone: Backbone) -> Path:
    """Tiny models (`words` has a vocabulary of ten), two sets of heads, conversations, a suite."""
    folder = tmp_path_factory.mktemp("made")
    save_tiny(folder / "model")
    save_tiny(folder / "words", vocab_size=len(WORDS))
    unembedding, base = backbone.unembedding, backbone.fingerprint
    for name in ("heads", "others"):
        heads = make_heads("translator", unembedding, base_fingerprint=base, exit_layers=(2, 5))
        (train(heads) if name == "others" else heads).save(folder / name)
    (folder / "talks.jsonl").write_text(talk_lines(backbone.model))
    prompts = [{"prompt": text, "task": "QA"} for text in ("a", "b c", "c a b", "a a b")]
    (folder / "suite.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return folder


@pytest.fixture
def workplace(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: one for this test, with links to the files of `made`."""
    monkeypatch.chdir(link_all(made, tmp_path))
    return tmp_path
