"""What a sequence holds: committed ids, its deep state, and queues of hidden states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from selfspec.decoding.drafters.base import Draft, NoDrafter
from selfspec.decoding.state import DecodeState, HiddenCache
from selfspec.decoding.stats import Stopwatch
from selfspec.decoding.work import Steps, alone, padded
from selfspec.eval.scripted import MixedDrafter
from selfspec.model.backbone import Backbone
from selfspec.model.kv import Lease, Rows
from tests import ladder
from tests.models import random_ids
from tests.watched import EXIT_LAYERS, WatchedBackbone


@pytest.fixture(scope="module")
def cut(exact: Any) -> Backbone:
    return Backbone(exact)


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


def test_deep_is_the_last_layers_output_before_the_newest_token(cut: Backbone) -> None:
    ids = random_ids(7)
    assert DecodeState(cut, ids).deep is None  # not known before the first pass
    plain = ladder.decode(cut, ids, NoDrafter())
    text = [*ids[0].tolist(), *plain.tokens]
    keeper = DeepKeeper(MixedDrafter(text, 1, cut.vocab_size, width=5))
    found = ladder.decode(cut, ids, keeper)
    assert found.tokens == plain.tokens
    assert len({entry.accepted for entry in found.entries}) > 2
    with torch.no_grad():
        hidden = cut.embed(torch.tensor(text))
        rows = Rows.of(Lease(cut.num_layers), 0, len(text), hidden.device)
        outputs = cut.run(hidden, 0, cut.num_layers, rows)
    assert len(keeper.deep) > 3
    for position, deep in keeper.deep.items():
        # float64 with norms in float32; largest difference measured: 3e-7
        torch.testing.assert_close(deep, outputs[position : position + 1], rtol=0, atol=1e-5)


def test_committed_ids_are_read_without_padding(cut: Backbone) -> None:
    state = DecodeState(cut, torch.tensor([[0, 0, 5, 6, 7]]), pad=2)
    assert state.committed(0) == [5, 6, 7]
    state.append(8, 0)
    assert state.committed(2) == [7, 8]
    assert state.committed(4) == []


@pytest.fixture
def cache(watched: WatchedBackbone) -> Iterator[HiddenCache]:
    """Empty, with boundaries at 0, 2, 4, 6, 8."""
    with torch.inference_mode():
        yield HiddenCache(watched, Lease(8), EXIT_LAYERS)


def test_pushed_rows_wait_in_order_and_stay_when_looked_at(
    cache: HiddenCache, watched: WatchedBackbone
) -> None:
    embedded = watched.embed(random_ids(3)[0])
    cache.push(embedded[:2])
    cache.push(embedded[2:])
    assert torch.equal(cache.rows(0), embedded)
    assert torch.equal(cache.rows(0), embedded)
    assert cache.schedule.pushed == 3
    assert cache.schedule.depths == (0, 2, 4, 6, 8)


def test_advance_empties_one_queue_and_returns_only_what_it_ran(
    cache: HiddenCache, watched: WatchedBackbone
) -> None:
    embedded = watched.embed(random_ids(3)[0])
    cache.push(embedded[:2])
    first = alone(cache.advance(0))
    cache.push(embedded[2:])
    second = alone(cache.advance(0))
    assert (len(first), len(second)) == (2, 1)
    assert torch.equal(cache.rows(1), torch.cat([first, second]))
    cache.push(embedded[:1])
    assert torch.equal(cache.rows(0), embedded[:1])


def test_clear_drops_rows_and_passes_but_not_the_list_handed_out(
    cache: HiddenCache, watched: WatchedBackbone
) -> None:
    cache.push(watched.embed(random_ids(2)[0]))
    alone(cache.advance(0))
    passes = cache.schedule.passes
    cache.push(watched.embed(random_ids(1)[0]))
    cache.clear()
    assert (cache.schedule.pushed, cache.schedule.passes) == (0, [])
    assert passes == [(2, 0, 2)]
    cache.push(watched.embed(random_ids(3)[0]))
    assert len(cache.rows(0)) == 3


@pytest.mark.parametrize(
    ("rows", "pinned", "expected"), [(1, 4, 4), (4, 4, 4), (5, 4, 5), (1, None, 1)]
)
def test_pinned_passes_are_padded_with_zeros_to_a_fixed_number(
    watched: WatchedBackbone, rows: int, pinned: int | None, expected: int
) -> None:
    cache = HiddenCache(watched, Lease(8), EXIT_LAYERS, pinned_rows=pinned)
    hidden = torch.ones(rows, 32)
    found = padded(hidden, cache.least)
    assert found.shape == (expected, 32)
    assert torch.equal(found[:rows], hidden)
    assert not found[rows:].any()


def test_logits_are_padded_as_passes_are_and_come_back_without_padding(
    watched: WatchedBackbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Tensor] = []

    def logits(_: Any, hidden: Tensor) -> Tensor:
        seen.append(hidden)
        return hidden[:, :5]

    monkeypatch.setattr(WatchedBackbone, "logits", logits)
    hidden = torch.ones(2, 32)
    target = alone(HiddenCache(watched, Lease(8), pinned_rows=4).unembed(hidden))
    assert torch.equal(seen[0], padded(hidden, 4))
    assert torch.equal(target.logits, hidden[:, :5])


@torch.inference_mode()
def test_padding_leaves_no_trace_in_queues_keys_or_counts(watched: WatchedBackbone) -> None:
    lease = Lease(8)
    cache = HiddenCache(watched, lease, EXIT_LAYERS, pinned_rows=4)
    embedded = watched.embed(random_ids(3)[0])
    block = torch.nn.functional.pad(embedded, (0, 0, 0, 1))
    expected = watched.run(block, 0, 2, Rows.of(Lease(8), 0, 4, block.device))[:3]
    cache.push(embedded)
    assert torch.equal(alone(cache.advance(0)), expected)
    assert torch.equal(cache.rows(1), expected)
    assert cache.schedule.passes == [(3, 0, 2)]
    assert [lease.length(layer) for layer in range(8)] == [3, 3, 0, 0, 0, 0, 0, 0]
    assert watched.runs[-1] == ([0, 1, 2, 3], 0, 2)
