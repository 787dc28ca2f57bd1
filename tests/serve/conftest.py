"""Fixtures: one server with the default model, OpenAI's client for it, and a tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

import selfspec
from selfspec.api.speculator import Speculator
from tests.api.test_text import byte_level_bpe
from tests.models import make_model
from tests.serve.live import Running, answers, running

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
SIZES: dict[str, Any] = {"vocab_size": 288, "max_position_embeddings": 8192}
DRAFTS: dict[str, Any] = {"heads": "logit-lens", "drafter": "exit:layers=2/5,threshold=0.05"}


@pytest.fixture(scope="session")
def server(default: Speculator) -> Iterator[Running]:
    with running(default) as instance:
        yield instance


@pytest.fixture
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="session")
def tiny() -> Speculator:
    """A random model with one token per byte. Some of its drafts are right."""
    tokenizer = byte_level_bpe()
    tokenizer.chat_template = TEMPLATE
    return selfspec.wrap(make_model("llama", **SIZES), tokenizer, **DRAFTS)


@pytest.fixture(scope="session")
def folder(tiny: Speculator, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model in a folder of the same name, for other processes to load."""
    path = tmp_path_factory.mktemp("served") / tiny.label
    assert tiny.tokenizer is not None
    make_model("llama", **SIZES).save_pretrained(path)  # saving changes the model's config
    tiny.tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def small(tiny: Speculator) -> Iterator[Running]:
    """A server with the tiny model, after an answer: files that stay open are open already."""
    with running(tiny) as instance:
        answers(instance)
        yield instance
