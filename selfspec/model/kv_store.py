"""Keys and values per layer: filled by attention while layers run, cut after each round.

Each layer has a length of its own, since shallow layers see drafts that deep layers have not seen
yet. Buffers have room to spare, and grow in steps; what is kept of a chain only moves a number.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from selfspec.model.kv_pages import Page, PageLayout, Pages

_FIRST_SLOTS = 256
"""Slots of a new buffer: a short answer to a short prompt fits without growing."""

_SPARE = 4
"""One slot more for so many that are needed: a text that grows is copied a few times, and takes
little more than it fills."""


class Lease:
    """Where the keys and values of one sequence are, layer by layer.

    It offers the few methods that transformers' attention layers (`update`) and mask functions
    (`get_seq_length`, `get_query_offset`, `get_mask_sizes`) call on a cache. Compiled attention
    asks for `pages` instead.

    With `slots`, attention always sees buffers of exactly that many slots, the unused ones masked:
    the shape of a pass then never depends on how many positions are filled (pinned mode).
    """

    def __init__(self, num_layers: int, slots: int | None = None) -> None:
        self.num_layers = num_layers
        self.slots = slots
        self._lengths = [0] * num_layers
        self._pages: Pages | None = None
        self._keys: list[Tensor | None] = [None] * num_layers  # [B, kv heads, slots, head_dim]
        self._values: list[Tensor | None] = [None] * num_layers

    @property
    def is_compileable(self) -> bool:
        """True with fixed slots: a one-row pass then needs a mask too."""
        return self.slots is not None

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values of all positions that are held."""
        if self._pages is not None:
            return self._pages.nbytes(self._lengths)
        return sum(
            buffer[..., :length, :].nbytes
            for buffers in (self._keys, self._values)
            for buffer, length in zip(buffers, self._lengths, strict=True)
            if buffer is not None
        )

    def length(self, layer: int) -> int:
        """Positions held by `layer`, counted from 0."""
        return self._lengths[layer]

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Append [B, heads, T, head_dim] to `layer`; return all it holds, [B, heads, length, ..].

        With fixed slots the whole buffers come back; the mask hides what is not filled.
        """
        start = self._lengths[layer]
        end = start + keys.shape[-2]
        self.check_room(end)
        seen = self.slots or end
        all_keys = self._keys[layer] = self._room(self._keys[layer], keys, start, seen)
        all_values = self._values[layer] = self._room(self._values[layer], values, start, seen)
        all_keys[..., start:end, :] = keys
        all_values[..., start:end, :] = values
        self._lengths[layer] = end
        return all_keys[..., :seen, :], all_values[..., :seen, :]

    def first(self, count: int, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first positions of `layer`, [B, heads, count, head_dim]; views."""
        keys, values = self._keys[layer], self._values[layer]
        if keys is None or values is None:
            raise IndexError(f"layer {layer} holds nothing")
        return keys[..., :count, :], values[..., :count, :]

    def pages(self, count: int, first: int, layout: PageLayout) -> list[Page]:
        """All pages, with room for `count` positions more in the layers from first+1 on.

        For code that writes there by itself and then calls `extend`.
        """
        start = self._lengths[first]
        self.check_room(start + count)
        if self._pages is None:
            self._pages = self._new_pages(layout)
        return self._pages.room(start, start + count)

    def _new_pages(self, layout: PageLayout) -> Pages:
        return Pages(layout)

    def check_room(self, end: int) -> None:
        """Raise IndexError unless `end` positions fit the fixed slots, if there are any."""
        if self.slots is not None and end > self.slots:
            raise IndexError(f"{end} positions do not fit {self.slots} fixed slots")

    def move_to(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Keep keys and values in these buffers from now on, [B, kv heads, slots, head_dim] each.

        One of each per layer, with slots for what is held, which is copied.
        """
        for ours, theirs in ((self._keys, keys), (self._values, values)):
            for layer, length in enumerate(self._lengths):
                if (held := ours[layer]) is not None:
                    theirs[layer][..., :length, :] = held[..., :length, :]
            ours[:] = theirs

    def extend(self, count: int, first: int, last: int) -> None:
        """Count positions that were written into the buffers of layers first+1..last directly."""
        self._lengths[first:last] = [held + count for held in self._lengths[first:last]]

    def truncate(self, length: int, first: int = 0, last: int | None = None) -> None:
        """Cut layers first+1..last (default all) to at most `length` positions; copies nothing."""
        last = self.num_layers if last is None else last
        self._lengths[first:last] = [min(held, length) for held in self._lengths[first:last]]

    def keep(self, start: int, path: Sequence[int]) -> None:
        """Of the positions from `start` on keep those of `path`, in every layer.

        `path` counts from `start` and rises: the accepted rows of a round. A chain's are 0, 1, ..,
        and nothing is copied; those of a tree move up.
        """
        for place, row in enumerate(path):
            if row != place:
                self._move(start + row, start + place)
        self.truncate(start + len(path))

    def _move(self, here: int, there: int) -> None:
        """Copy what all layers hold of one slot to another one, all buffers in one call."""
        if self._pages is not None:
            self._pages.move(here, there)
            return
        buffers = [one for one in (*self._keys, *self._values) if one is not None]
        if buffers:
            torch._foreach_copy_(
                [buffer.select(-2, there) for buffer in buffers],
                [buffer.select(-2, here) for buffer in buffers],
            )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """What transformers calls `length`."""
        return self._lengths[layer_idx]

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Position of the next row of a layer."""
        return self._lengths[layer_idx]

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Keys that a mask for `query_length` more rows covers, and the first key's position."""
        return self.slots or self._lengths[layer_idx] + query_length, 0

    def _room(self, buffer: Tensor | None, like: Tensor, used: int, needed: int) -> Tensor:
        """`buffer`, or a larger copy of its first `used` slots if it has fewer than needed."""
        if buffer is not None and buffer.shape[-2] >= needed:
            return buffer
        slots = self.slots or max(_FIRST_SLOTS, needed + needed // _SPARE)
        # zeros, not empty: masked slots weigh nothing, but nothing times NaN is NaN
        grown = like.new_zeros(*like.shape[:-2], fixed_slots(slots), like.shape[-1])
        if buffer is not None:
            grown[..., :used, :] = buffer[..., :used, :]
        return grown


def fixed_slots(length: int) -> int:
    """Slots for sequences of up to `length` positions: the next multiple of 64.

    Few distinct values mean few shapes, and each shape in use is probed once.
    """
    return -(-length // 64) * 64
