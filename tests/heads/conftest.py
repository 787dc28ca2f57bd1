"""Fixtures of the heads' tests: the tiny Llama, its unembedding, and hidden states."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from selfspec.model.parts import Unembedding
from tests.models import wrapped


@pytest.fixture
def unembedding() -> Unembedding:
    return wrapped("llama").unembedding


@pytest.fixture
def hidden() -> Tensor:
    """[1, 3, d]"""
    return torch.randn(1, 3, 32, generator=torch.Generator().manual_seed(2))
