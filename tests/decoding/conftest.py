"""Speculators that the tests of decoding share, and a model that records its passes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from selfspec.api.speculator import Speculator, wrap
from selfspec.decoding.drafters.rest import Datastore
from selfspec.model.backbone import Backbone
from selfspec.model.generic import States
from selfspec.model.kv import Rows
from tests.models import make_model, random_ids
from tests.talks import make_tokenizer


@pytest.fixture(scope="module")
def eager(exact: Any, tmp_path_factory: pytest.TempPathFactory) -> Speculator:
    """A speculator whose drafters always draft, mostly wrongly, and whose rows cost nothing."""
    store = tmp_path_factory.mktemp("store") / "store.safetensors"
    Datastore.of(random_ids(20_000).tolist(), make_tokenizer()).save(store)
    second = make_model("llama", torch.float64, num_hidden_layers=2)
    exits = "exit:layers=2/5,threshold=0.05,max_tokens=3"
    writer = wrap(exact, heads="logit-lens", draft_model=second, datastore=store, drafter=exits)
    writer.options = writer.options.updated({"draft_model": "max_tokens=3", "costs": "row=0"})
    return writer


class WatchedBackbone(Backbone):
    """A Llama in float64 that records the positions and layers of every pass.

    It checks the cache's invariants on entry.
    """

    def __init__(self, layers: int) -> None:
        self.runs: list[tuple[list[int], int, int]] = []
        self.passes_until_error = -1
        model = make_model("llama", torch.float64, num_hidden_layers=layers)
        super().__init__(model, executor="generic")

    def run(
        self, hidden: Tensor, first: int, last: int, rows: Rows, states: States | None = None
    ) -> Tensor:
        kv = rows.span.kv
        lengths = [kv.length(layer) for layer in range(self.num_layers)]
        assert lengths == sorted(lengths, reverse=True)  # never more in a deeper layer
        start = lengths[first]
        assert set(lengths[first:last]) == {start}
        assert rows.positions.tolist() == list(range(start, start + len(hidden)))
        self.runs.append((rows.positions.tolist(), first, last))
        self.passes_until_error -= 1
        if self.passes_until_error == 0:
            super().run(hidden, first, first + 1, rows)
            raise RuntimeError("out of memory in the second layer of a pass")
        return super().run(hidden, first, last, rows, states)


@pytest.fixture(scope="module")
def shared() -> WatchedBackbone:
    """The model behind `watched`, built once per test file; for fixtures that outlive a test."""
    return WatchedBackbone(8)


@pytest.fixture
def watched(shared: WatchedBackbone) -> Iterator[WatchedBackbone]:
    shared.runs.clear()
    yield shared
    shared.passes_until_error = -1
