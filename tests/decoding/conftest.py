"""The model and the speculators that tests of decoding share."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from selfspec.api.speculator import Speculator, wrap
from selfspec.decoding.drafters.rest import Datastore
from tests.conftest import TinyModel
from tests.models import make_model, random_ids
from tests.talks import make_tokenizer


@pytest.fixture(scope="session")
def exact(tiny_model: TinyModel) -> Any:
    """The tiny Llama in float64, where equal tokens are no matter of luck; do not change it."""
    return tiny_model("llama", torch.float64)


@pytest.fixture(scope="module")
def eager(exact: Any, tmp_path_factory: pytest.TempPathFactory) -> Speculator:
    """Whatever drafts, drafts all the time, mostly wrongly; prompt lookup in full."""
    store = tmp_path_factory.mktemp("store") / "store.safetensors"
    Datastore.of(random_ids(20_000).tolist(), make_tokenizer()).save(store)
    second = make_model("llama", torch.float64, num_hidden_layers=2)
    exits = "exit:layers=2/5,threshold=0.05,max_tokens=3"
    found = wrap(exact, heads="logit-lens", draft_model=second, datastore=store, drafter=exits)
    found.options = found.options.updated({"draft_model": "max_tokens=3", "costs": "row=0"})
    return found
