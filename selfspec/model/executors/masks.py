"""Which positions a row looks at, as the attention of transformers takes it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.masking_utils import (
    create_causal_mask,
    create_chunked_causal_mask,
    create_sliding_window_causal_mask,
)

from selfspec.model.parts import CHUNKED, FULL, SLIDING
from selfspec.model.rows import ancestors, held_behind

MASKS = {
    FULL: create_causal_mask,
    SLIDING: create_sliding_window_causal_mask,
    CHUNKED: create_chunked_causal_mask,
}
"""Attention types whose layers keep one key and value per position, and who makes their masks."""


def tree_mask(
    kind: str,
    config: PreTrainedConfig,
    positions: Tensor,
    parents: Sequence[int],
    start: int,
    width: int,
    like: Tensor,
) -> Tensor:
    """The mask for rows of a tree at `positions` [T], [1, 1, T, width].

    The first `start` slots hold a position each; behind them lie the rows, in order.
    """
    count = len(parents)
    slots = torch.arange(width, device=positions.device)
    slots[start : start + count] = positions  # siblings share a position
    unseen = torch.tensor(held_behind(parents), device=positions.device)
    visible = slots < start - unseen[:, None]
    visible[:, start : start + count] = ancestors(parents, positions.device)
    if kind == SLIDING:
        visible &= positions[:, None] - slots < config.sliding_window
    elif kind == CHUNKED:
        size = config.attention_chunk_size
        visible &= positions[:, None] // size == slots // size
    return as_mask(visible, config, like)


def as_mask(visible: Tensor, config: PreTrainedConfig, like: Tensor) -> Tensor:
    """[T, S] of truths -> [1, 1, T, S] as the model's attention reads it; `like`: its dtype."""
    if config._attn_implementation == "eager":
        lowest = torch.finfo(like.dtype).min
        visible = torch.where(visible, like.new_zeros(()), lowest)
    return visible[None, None]
