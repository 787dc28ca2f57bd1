"""Fixtures of training's tests: conversations of the tiny model, and their tokenizer."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerBase

from selfspec.model.backbone import Backbone
from tests.talks import Talks, make_talks, make_tokenizer


@pytest.fixture(scope="session")
def talks(backbone: Backbone) -> Talks:
    return make_talks(backbone.model)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    return make_tokenizer()
