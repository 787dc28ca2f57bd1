"""Fixtures of the command's tests: a fake Speculator, standard input, a log put back, a folder."""

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
from selfspec.cli.base import Asked
from selfspec.cli.main import main
from selfspec.model.backbone import Backbone
from tests.cli.fakes import Call, FakeSpeculator, link_all
from tests.heads.kinds import make_heads, train
from tests.talks import WORDS, save_tiny, talk_lines


@pytest.fixture(autouse=True)
def quiet_afterwards() -> Iterator[None]:
    """Takes back the handler that a command adds: it writes to this test's standard error."""
    logger = logging.getLogger("selfspec")
    handlers, level = list(logger.handlers), logger.level
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    """Runs a command and gives what it wrote, once its exit code is as said: 0, if nothing is.

    Standard input is what is `given`; None: as it is.
    """

    def called(arguments: list[str], code: int = 0, *, given: bytes | None = b"") -> Any:
        if given is not None:
            stdin = io.TextIOWrapper(io.BytesIO(given), encoding="utf-8")
            monkeypatch.setattr(sys, "stdin", stdin)
        found, said = main(arguments), capsys.readouterr()
        assert found == code, said.err
        return said

    return called


@pytest.fixture
def speculator(monkeypatch: pytest.MonkeyPatch) -> FakeSpeculator:
    """What every command loads; `loaded` holds what it was asked with."""
    fake = FakeSpeculator()

    def load(asked: Asked) -> FakeSpeculator:
        fake.loaded = asked
        return fake

    monkeypatch.setattr(base, "load", load)
    return fake


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory, backbone: Backbone) -> Path:
    """Tiny models (`words` has a vocabulary of ten), two sets of heads, talks, a suite."""
    folder = tmp_path_factory.mktemp("made")
    save_tiny(folder / "model")
    save_tiny(folder / "words", vocab_size=len(WORDS))
    unembedding, base = backbone.unembedding, backbone.fingerprint
    for name in ("heads", "others"):
        heads = make_heads("translator", unembedding, base_fingerprint=base, exit_layers=(2, 5))
        (train(heads) if name == "others" else heads).save(folder / name)
    (folder / "talks.jsonl").write_text(talk_lines(backbone.model))
    prompts = [{"prompt": text, "task": "QA"} for text in ("a", "b c", "c a b", "a a b")]
    (folder / "suite.jsonl").write_text("".join(json.dumps(one) + "\n" for one in prompts))
    return folder


@pytest.fixture
def workplace(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: one of this test's own, with links to what is made."""
    monkeypatch.chdir(link_all(made, tmp_path))
    return tmp_path
