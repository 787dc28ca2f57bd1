"""One server with the default model for all tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import selfspec
from selfspec.api.speculator import Speculator
from tests.serve.live import Running, running


@pytest.fixture(scope="session")
def default() -> Speculator:
    return selfspec.load()


@pytest.fixture(scope="session")
def server(default: Speculator) -> Iterator[Running]:
    with running(default) as found:
        yield found
