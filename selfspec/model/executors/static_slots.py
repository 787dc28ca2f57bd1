"""Keys and values at addresses that never change, so that a captured segment finds them again.

The CUDA-graph executor owns one set of buffers and lends it to one sequence at a time. Sequences
that take turns (two streams, a session beside a probe) are copied out and in; one alone never is.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from selfspec.model.kv_store import Lease


class StaticSlots:
    """Buffers of every layer, [1, kv heads, slots, head_dim], and the sequence that has them."""

    def __init__(self, samples: Sequence[tuple[Tensor, Tensor]], slots: int) -> None:
        """`samples`: keys and values of one position, [1, kv heads, 1, head_dim], per layer."""
        self.slots = slots
        with torch.inference_mode(False):  # else only inference mode could write to them
            self.keys = [_zeros(keys, slots) for keys, _ in samples]
            self.values = [_zeros(values, slots) for _, values in samples]
        self._tenant: weakref.ref[Lease] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in (*self.keys, *self.values))

    def lend(self, kv: Lease) -> None:
        """Move the keys and values of `kv` here; those of the sequence before it move out."""
        if self._tenant is not None and self._tenant() is kv:
            return
        self.recall()
        for buffer in (*self.keys, *self.values):
            buffer.zero_()  # masked slots weigh nothing, but nothing times NaN is NaN
        kv.move_to(self.keys, self.values)
        self._tenant = weakref.ref(kv)

    def recall(self) -> None:
        """Move out what is lent, into buffers of its own; a sequence that is gone needs none."""
        tenant = None if self._tenant is None else self._tenant()
        self._tenant = None
        if tenant is not None:
            held = max(tenant.length(layer) for layer in range(tenant.num_layers))
            tenant.move_to(
                [_zeros(buffer, held) for buffer in self.keys],
                [_zeros(buffer, held) for buffer in self.values],
            )


class SlotView:
    """What the layers of one segment see of the slots: their cache, in transformers' terms.

    Where a row is written is read from `places` on the device: a replay with other places writes
    elsewhere.
    """

    def __init__(self, slots: StaticSlots, places: Tensor, seen: int) -> None:
        """`places` [rows]: slots; layers look at the first `seen` slots."""
        self._slots = slots
        self._places = places
        self._seen = seen

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Write [1, heads, rows, head_dim] at their places; what is seen, [1, heads, S, ..]."""
        all_keys, all_values = self._slots.keys[layer], self._slots.values[layer]
        all_keys.index_copy_(2, self._places, keys)
        all_values.index_copy_(2, self._places, values)
        return all_keys[:, :, : self._seen], all_values[:, :, : self._seen]


class SamplingLease(Lease):
    """A lease that notes what each layer wants to keep."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(num_layers)
        self.samples: dict[int, tuple[Tensor, Tensor]] = {}

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *_: object, seen: int = 0, **__: object
    ) -> tuple[Tensor, Tensor]:
        """As of any cache."""
        self.samples[layer] = keys, values
        return super().update(keys, values, layer, seen=seen)


def _zeros(like: Tensor, slots: int) -> Tensor:
    """[1, heads, slots, head_dim] for a buffer of any number of slots."""
    return like.new_zeros(*like.shape[:-2], slots, like.shape[-1])
