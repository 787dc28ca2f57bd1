"""Fixtures of the command's tests: the fake Speculator, standard input, a log put back."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Callable, Iterator

import pytest

from selfspec.cli import common
from selfspec.cli.settings import Settings
from tests.cli.fakes import FakeSpeculator


@pytest.fixture(autouse=True)
def quiet_afterwards() -> Iterator[None]:
    """Takes back the handler that a command adds: it writes to this test's standard error."""
    logger = logging.getLogger("selfspec")
    handlers, level = list(logger.handlers), logger.level
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)


@pytest.fixture
def speculator(monkeypatch: pytest.MonkeyPatch) -> FakeSpeculator:
    """What every command loads; `loaded` holds the settings that it was asked with."""
    fake = FakeSpeculator()

    def load(settings: Settings) -> FakeSpeculator:
        fake.loaded = settings
        return fake

    monkeypatch.setattr(common, "load", load)
    return fake


@pytest.fixture
def piped(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    """Puts bytes on standard input."""

    def pipe(data: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))

    return pipe
