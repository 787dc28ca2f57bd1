"""Fixtures of training's tests: conversations of the tiny model, and their tokenizer."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerBase

from selfspec.model.backbone import Backbone
from selfspec.training.text import Conversation
from tests.talks import make_talks, make_tokenizer


@pytest.fixture(scope="session")
def talks(backbone: Backbone) -> list[Conversation]:
    return make_talks(backbone.model)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    """Not to be changed."""
    return make_tokenizer()
