"""Keys and values per layer: filled by attention while layers run, cut after each round.

Each layer has a length of its own, since shallow layers see drafts that deep layers have not seen
yet. Buffers have room to spare, and grow in steps; what is kept of a chain only moves a number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

_FIRST_SLOTS = 256
"""Slots of a new buffer: a short answer to a short prompt fits without growing."""

_SPARE = 4
"""One slot more for so many that are needed: a text that grows is copied a few times, and takes
little more than it fills."""


class Lease:
    """Where the keys and values of one sequence are, layer by layer.

    It offers the few methods that transformers' attention layers (`update`) and mask functions
    (`get_seq_length`, `get_query_offset`, `get_mask_sizes`) call on a cache.

    With `slots`, attention always sees buffers of exactly that many slots, the unused ones masked:
    the shape of a pass then never depends on how many positions are filled (pinned mode).
    """

    def __init__(self, num_layers: int, slots: int | None = None) -> None:
        self.num_layers = num_layers
        self.slots = slots
        self._lengths = [0] * num_layers
        self._panel = 1
        self._keys: list[Tensor | None] = [None] * num_layers  # [B, kv heads, slots, head_dim]
        self._values: list[Tensor | None] = [None] * num_layers

    @property
    def is_compileable(self) -> bool:
        """True with fixed slots: a one-row pass then needs a mask too."""
        return self.slots is not None

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values of all positions that are held."""
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
        self, keys: Tensor, values: Tensor, layer: int, *_: object, seen: int = 0, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Append [B, heads, T, head_dim] to `layer`; return all it holds, [B, heads, length, ..].

        With fixed slots the whole buffers come back, else at least `seen` slots; the mask hides
        what is not filled.
        """
        start = self._lengths[layer]
        end = start + keys.shape[-2]
        self.check_room(end)
        seen = self.slots or max(seen, end)
        all_keys = self._keys[layer] = self._room(self._keys[layer], keys, start, seen)
        all_values = self._values[layer] = self._room(self._values[layer], values, start, seen)
        all_keys[..., start:end, :] = keys
        all_values[..., start:end, :] = values
        self._lengths[layer] = end
        return all_keys[..., :seen, :], all_values[..., :seen, :]

    def room(
        self, count: int, first: int, last: int, like: Tensor, panel: int = 1
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The whole buffers of layers first+1..last, with room for `count` positions more.

        For code that writes there by itself and then calls `extend`. `like`: keys of no position,
        [B, heads, 0, head_dim]. The keys of so many slots as `panel` lie side by side,
        [B, heads, slots / panel, head_dim, panel].
        """
        self._panel = panel
        for layer in range(first, last):
            start = self._lengths[layer]
            self.check_room(start + count)
            keys = self._room(self._keys[layer], like, start, start + count)
            values = self._room(self._values[layer], like, start, start + count)
            self._keys[layer], self._values[layer] = keys, values
            yield keys, values

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
        pairs = [
            (_slot(buffer, there, panel), _slot(buffer, here, panel))
            for panel, buffers in ((self._panel, self._keys), (1, self._values))
            for buffer in buffers
            if buffer is not None
        ]
        if pairs:
            torch._foreach_copy_([new for new, _ in pairs], [old for _, old in pairs])

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
            used = fixed_slots(used)  # an executor may order the numbers of 64 slots by itself
            grown[..., :used, :] = buffer[..., :used, :]
        return grown


def fixed_slots(length: int) -> int:
    """Slots for sequences of up to `length` positions: the next multiple of 64.

    Few distinct values mean few shapes, and each shape in use is probed once.
    """
    return -(-length // 64) * 64


def _slot(buffer: Tensor, slot: int, panel: int) -> Tensor:
    """What [B, kv heads, slots, head_dim] holds of a slot, where `panel` slots lie side by side."""
    if panel == 1:
        return buffer.select(-2, slot)
    panels = buffer.view(*buffer.shape[:-2], -1, buffer.shape[-1], panel)
    return panels.select(-1, slot % panel).select(-2, slot // panel)
