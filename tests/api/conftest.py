"""The model and the speculator that tests of the facade share."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from selfspec.api.speculator import Speculator, wrap
from tests.conftest import TinyModel


@pytest.fixture(scope="session")
def exact(tiny_model: TinyModel) -> Any:
    """The tiny Llama in float64; do not change it."""
    return tiny_model("llama", torch.float64)


@pytest.fixture(scope="module")
def speculator(exact: Any) -> Speculator:
    """Drafts all the time, mostly wrongly."""
    return wrap(exact, heads="logit-lens", drafter="exit:layers=2/5,threshold=0.05,max_tokens=4")
