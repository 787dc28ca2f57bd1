"""Whether the rows of a pass change each other: then drafts move the tokens beside them.

Comes in: a Decoder. Goes out: what was found, in words, or nothing. A quantisation that takes one
scale for all rows of a pass does it, and no draft is lossless there. Called by the backbone when
the model's own modules run.
"""

from __future__ import annotations

import torch
from torch import Tensor

from selfspec.model.conformance import evaluation
from selfspec.model.decoder import Decoder
from selfspec.model.kv_store import Lease
from selfspec.model.rows import Rows

_BEHIND, _BESIDE = 7, 7
"""Rows in front of the watched one, and beside it."""

_SPIKE = 100.0
"""How much larger than usual some numbers of an outlying row are: one of 64, or eight in all."""

_ROUNDING = {
    torch.float64: 1e-9,
    torch.float32: 1e-5,
    torch.bfloat16: 5e-3,
    torch.float16: 1e-3,
}
"""Change of a row, relative to what a layer adds, that rounding may make: experts that each take a
part of the rows run other shapes for other neighbours. With 8-bit weights and activations
(bitsandbytes) a row changes by 0.025 in bfloat16 and 0.003 in float32."""


def find_mixing(decoder: Decoder) -> str | None:
    """How outlying neighbours change a row that ran before them in the same pass, or None.

    Two passes of one shape differ in the rows behind the watched one only, layer by layer. A row
    that minds itself comes out with the same bits.
    """
    rows = _BEHIND + 1 + _BESIDE
    if rows > decoder.max_positions:
        return None
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(decoder.vocab_size, (rows,), generator=generator).to(decoder.device)
    lease = Lease(decoder.num_layers)
    with torch.inference_mode(), evaluation(decoder.model):
        behind, block = decoder.embed(ids).split([_BEHIND, 1 + _BESIDE])
        first = Rows.of(lease, 0, _BEHIND, ids.device)
        watched = Rows.of(lease, _BEHIND, 1 + _BESIDE, ids.device)
        for layer in range(decoder.num_layers):
            behind = decoder.run(behind, layer, layer + 1, first)
            outlying = decoder.run(_spiked(block), layer, layer + 1, watched)
            lease.truncate(_BEHIND, layer, layer + 1)
            before, block = block, decoder.run(block, layer, layer + 1, watched)
            found = _change(block[:1], outlying[:1], (block - before)[:1])
            if found is not None:
                return f"layer {layer + 1}, {found}"
        usual, outlying = decoder.logits(block), decoder.logits(_spiked(block))
        found = _change(usual[:1], outlying[:1], usual[:1])
        return None if found is None else f"the logits, {found}"


def _change(usual: Tensor, outlying: Tensor, added: Tensor) -> str | None:
    """How much outlying neighbours change a row, in words, or None.

    The row beside usual and beside outlying ones, [1, ..]; `added`: what was computed for it.
    """
    if torch.equal(usual, outlying):
        return None
    change = _size(outlying - usual) / _size(added)
    if change <= _ROUNDING.get(usual.dtype, 0.0):
        return None
    return f"by {change:.2g} of what it computes"


def _spiked(rows: Tensor) -> Tensor:
    """[T, d] with numbers far out, in other places of each row but the first."""
    spiked, step = rows.clone(), max(64, rows.shape[-1] // 8)
    for row in range(1, len(rows)):
        spiked[row, row::step] *= _SPIKE
    return spiked


def _size(values: Tensor) -> float:
    """Root mean square."""
    return float(values.float().square().mean().sqrt())
