"""What a sequence knows of itself between rounds."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from selfspec.decoding.drafters import Draft, NoDrafter
from selfspec.decoding.state import DecodeState
from selfspec.decoding.stats import Stopwatch
from selfspec.decoding.work import Steps
from selfspec.eval.scripted import MixedDrafter
from selfspec.model.backbone import Backbone
from selfspec.model.kv import Lease, Rows
from tests import ladder
from tests.models import make_model, random_ids


class DeepKeeper:
    """Drafts as another drafter does, and keeps the deep state it could have read."""

    def __init__(self, drafter: MixedDrafter) -> None:
        self.drafter = drafter
        self.deep: dict[int, Tensor] = {}

    def draft(self, state: DecodeState, limit: int, watch: Stopwatch) -> Steps[Draft]:
        assert state.deep is not None
        self.deep[state.length - 2] = state.deep
        return self.drafter.draft(state, limit, watch)

    def learn(self, draft: Draft, kept: Sequence[int]) -> None:
        self.drafter.learn(draft, kept)


@pytest.fixture(scope="module")
def exact() -> Backbone:
    return Backbone(make_model("llama", torch.float64))


def test_deep_is_the_last_layers_output_before_the_newest_token(exact: Backbone) -> None:
    ids = random_ids(7)
    plain = ladder.decode(exact, ids, NoDrafter())
    text = [*ids[0].tolist(), *plain.tokens]
    keeper = DeepKeeper(MixedDrafter(text, 1, exact.vocab_size, width=5))
    found = ladder.decode(exact, ids, keeper)
    assert found.tokens == plain.tokens
    assert len({entry.accepted for entry in found.entries}) > 2
    with torch.no_grad():
        hidden = exact.embed(torch.tensor(text))
        rows = Rows.of(Lease(exact.num_layers), 0, len(text), hidden.device)
        outputs = exact.run(hidden, 0, exact.num_layers, rows)
    assert len(keeper.deep) > 3
    for position, deep in keeper.deep.items():
        # float64 with norms in float32; largest difference measured: 3e-7
        torch.testing.assert_close(deep, outputs[position : position + 1], rtol=0, atol=1e-5)


def test_deep_is_not_known_before_the_first_pass(exact: Backbone) -> None:
    assert DecodeState(exact, random_ids(3)).deep is None


def test_committed_ids_are_read_without_padding(exact: Backbone) -> None:
    state = DecodeState(exact, torch.tensor([[0, 0, 5, 6, 7]]), pad=2)
    assert state.committed(0) == [5, 6, 7]
    state.append(8, 0)
    assert state.committed(2) == [7, 8]
    assert state.committed(4) == []
