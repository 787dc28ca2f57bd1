"""Tests, on this machine and model, that fixed shapes give fixed bits.

In pinned mode every pass has the same number of rows over the same number of slots, so that each
matrix product runs the same kernel whatever was drafted. That a kernel treats all rows of one
shape alike is a property of the kernel: it is measured here before anyone relies on it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from selfspec.backbone import Backbone
from selfspec.errors import PinnedUnavailable
from selfspec.hidden_cache import HiddenCache
from selfspec.kv_cache import KVCache

_PREFIX = 16
"""Tokens of context in front of the probed ones."""


@torch.inference_mode()
def check_pinned(backbone: Backbone, rows: int, slots: int) -> None:
    """Raise PinnedUnavailable unless logits are bitwise the same for every grouping of rows.

    The same 2 * `rows` random tokens run one at a time, in full blocks, and in uneven blocks with
    wrong tokens behind them. Costs about 3 * `rows` passes.
    """
    generator = torch.Generator().manual_seed(0)
    count = min(2 * rows, slots - rows - _PREFIX)
    ids = torch.randint(backbone.vocab_size, (1, _PREFIX + count), generator=generator)
    ids = ids.to(backbone.device)
    alone = _logits(backbone, ids, [1] * count, rows, slots)
    uneven = [1 + step % (rows - 1) for step in range(count)]
    for name, widths in {"full": [rows] * count, "uneven": uneven}.items():
        together = _logits(backbone, ids, widths, rows, slots)
        differing = int((alone != together).any(-1).sum())
        if differing:
            raise PinnedUnavailable(
                f"{differing} of {count} positions changed bits between one row and {name} blocks "
                f"of {rows} rows over {slots} slots: these kernels do not treat all rows alike"
            )


def _logits(backbone: Backbone, ids: Tensor, widths: list[int], rows: int, slots: int) -> Tensor:
    """Logits [count, V] of `ids` behind the prefix, run in blocks of `widths`.

    Blocks narrower than `rows` get wrong tokens behind them, as rejected drafts would be.
    """
    kv = KVCache(backbone.num_layers, slots)
    hidden = HiddenCache(backbone, kv, pinned_rows=rows)
    hidden.push(backbone.embed(ids[:, :_PREFIX]))
    hidden.advance_all()
    found: list[Tensor] = []
    start = _PREFIX
    while start < ids.shape[1]:
        block = ids[:, start : start + widths[len(found)]]
        wrong = (block[:, -1:] + 1) % backbone.vocab_size
        drafted = torch.cat([block, wrong.expand(-1, rows - block.shape[1])], dim=1)
        hidden.clear()
        hidden.push(backbone.embed(drafted if len(found) % 2 else block))
        states = hidden.advance_all()
        found.append(backbone.logits(hidden.padded(states))[0, : block.shape[1]])
        start += block.shape[1]
        kv.truncate(start)
    return torch.cat(found)
