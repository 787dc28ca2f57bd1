"""One server with the default model for all tests, and OpenAI's own client of it."""

from __future__ import annotations

from collections.abc import Iterator

import openai
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


@pytest.fixture
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0)
