"""Many texts in one compiled pass: each has the bits that it has alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from selfspec.model.backbone import Backbone
from selfspec.model.generic import Executor
from selfspec.model.kv import Lease, Rows, Span
from tests.models import make_model, needs_compiler, random_ids


@needs_compiler
@torch.inference_mode()
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("llama", torch.float32),
        ("gpt_neox", torch.float32),
        ("mistral", torch.bfloat16),
        ("gemma3", torch.bfloat16),
    ],
    ids=str,
)
def test_texts_of_one_pass_have_the_bits_that_they_have_alone(
    family: str, dtype: torch.dtype
) -> None:
    """A prompt, one row behind a chunk's end, a chain, a tree behind an older position."""
    backbone = Backbone(make_model(family, dtype, max_position_embeddings=700), executor="fused")
    layers = backbone.num_layers
    held = [0, 530, 70, 40]
    counts, parents = [33, 1, 3, 4], [None, None, None, (-4, 0, -1, 0)]
    leases = [[Lease(layers) for _ in held] for _ in range(2)]
    for lease, length in ((one, n) for each in leases for one, n in zip(each, held, strict=True)):
        text = backbone.embed(random_ids(length or 1, seed=length)[0][:length])
        if length:
            backbone.run(text, 0, layers, Rows.of(lease, 0, length, text.device))
    parts = [backbone.embed(random_ids(count, seed=90 + count)[0]) for count in counts]
    alone, together = (
        [
            Rows.of(lease, lease.length(0), count, parts[0].device, each)
            for lease, count, each in zip(some, counts, parents, strict=True)
        ]
        for some in leases
    )
    expected = [
        backbone.run(part, 0, layers, rows) for part, rows in zip(parts, alone, strict=True)
    ]
    found = backbone.run(torch.cat(parts), 0, layers, Rows.joined(together))
    assert torch.equal(found, torch.cat(expected))
    for ours, theirs in zip(*leases, strict=True):  # what was added is as it was alone, too
        assert ours.length(layers - 1) == theirs.length(layers - 1)
        newest = backbone.embed(random_ids(1)[0])
        both = [
            backbone.run(newest, 0, layers, Rows.of(lease, lease.length(0), 1, newest.device))
            for lease in (ours, theirs)
        ]
        assert torch.equal(*both)


@needs_compiler
def test_rows_that_belong_to_nobody_or_to_one_text_twice_are_refused() -> None:
    backbone = Backbone(make_model("llama"), executor="fused")
    embedded, lease = backbone.embed(random_ids(4)[0]), Lease(backbone.num_layers)
    two = Rows.joined([Rows.of(lease, 0, 2, embedded.device)] * 2)
    few = Rows(torch.arange(3), (Span(lease, 3),))
    for rows in (two, few):
        with torch.inference_mode(), pytest.raises(ValueError, match="4 rows are not those of"):
            backbone.run(embedded, 0, backbone.num_layers, rows)


class Mixing:
    """Adds a little to all rows of a pass of several texts."""

    def __init__(self, other: Executor) -> None:
        self.claims, self.weight_bytes, self.logits = other.claims, other.weight_bytes, other.logits
        self._other = other

    def run(self, hidden: Tensor, first: int, last: int, rows: Rows) -> Tensor:
        return self._other.run(hidden, first, last, rows) + 1e-3 * (len(rows.spans) > 1)


@needs_compiler
@torch.inference_mode()
def test_texts_that_change_each_other_run_one_by_one_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    backbone = Backbone(make_model("llama"), executor="fused")
    backbone._executor = Mixing(backbone._executor)
    layers, text = backbone.num_layers, backbone.embed(random_ids(4)[0])
    parts = [Rows.of(Lease(layers), 0, 2, text.device) for _ in range(2)]
    found = backbone.run(text, 0, layers, Rows.joined(parts))
    alone = [Rows.of(Lease(layers), 0, 2, text.device) for _ in range(2)]
    pairs = zip(text.split(2), alone, strict=True)
    assert torch.equal(
        found, torch.cat([backbone.run(part, 0, layers, one) for part, one in pairs])
    )
    assert "each runs by itself" in caplog.text
