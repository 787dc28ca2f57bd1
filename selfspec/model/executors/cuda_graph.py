"""Runs the model's own layers on a GPU as CUDA graphs: one launch per segment instead of hundreds.

A graph replays kernels with the addresses and shapes that it was captured with. So inputs are
copied into fixed buffers, rows are padded to a few counts, keys and values stay where they are
(`static_slots.py`), and which slots a row may see comes from slot numbers on the device. Nothing
here needs a GPU but the capture itself (`capture.py`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from selfspec.model.executors.capture import Capture, GraphCapture, Replays, uncaptured
from selfspec.model.executors.generic import SLIDING, GenericExecutor
from selfspec.model.executors.known import require_capturable
from selfspec.model.executors.static_slots import SamplingCache, SlotView, StaticSlots
from selfspec.model.kv_cache import KVCache

ROW_COUNTS = (1, 2, 4, 8, 16)
"""Rows of a captured pass; fewer are padded, more (prompts) run uncaptured."""

_MOST_ROWS = ROW_COUNTS[-1]

_FEWEST_SEEN = 256
"""Slots that a captured pass looks at: this, doubled as long as the text needs it. Each count takes
a graph of its own, and fewer counts cost more masked slots."""

_FIRST_SLOTS = 1024
"""Slots that there is memory for at first. More double it, and all segments are captured anew."""

_TRIAL_ROWS = (7, 1, 1, 1, 3)
"""Passes that a replay is tested with: one row is captured, then replayed with other inputs."""

_TRIAL_ERROR = 0.05
"""Largest error of a replay, relative to the output (root mean square): a library may pick another
kernel for a capture, but an input that a graph misses is off by much more."""

logger = logging.getLogger(__name__)


class CudaGraphExecutor:
    """Segments at fixed addresses, each captured once per number of rows and of slots."""

    min_rows = 1

    def __init__(self, decoder: Any, lm_head: nn.Module, *, slots: int = _FIRST_SLOTS) -> None:
        """Nothing is captured before `start_capture`. `slots`: positions with room at first.

        Raises ValueError, with the reason, for layers that cannot be captured.
        """
        require_capturable(decoder, lm_head)
        _require_one_device(decoder, lm_head)
        self._decoder = decoder
        self._generic = GenericExecutor(decoder, lm_head)
        self._num_layers = len(decoder.layers)
        self._samples = self._one_position()
        config = decoder.config
        limit = config.max_position_embeddings + _MOST_ROWS  # padding may lie behind the last one
        self._limit = -(-limit // 64) * 64
        weight = decoder.embed_tokens.weight
        with torch.inference_mode(False):
            self._hidden = weight.new_zeros(1, _MOST_ROWS, config.hidden_size)
            self._positions = torch.zeros(1, _MOST_ROWS, dtype=torch.int64, device=weight.device)
            self._places = torch.zeros_like(self._positions)  # the slots of the rows
            self._offsets = torch.arange(_MOST_ROWS, device=weight.device)[None]
        self._slots = StaticSlots(self._samples, self._count(min(slots, self._limit)))
        self._replays = Replays(lambda: uncaptured)
        self._lock = threading.Lock()  # answers may be written in several threads

    @property
    def captures(self) -> bool:
        """Whether segments are captured."""
        return self._replays.captures

    @property
    def nbytes(self) -> int:
        """Bytes that keys and values take."""
        return self._slots.nbytes

    def start_capture(self, strategy: Callable[[], Capture] | None = None) -> None:
        """From now on capture each segment at its first use; `strategy` makes a Capture.

        Raises ValueError if a replay does not compute what the segment does.
        """
        strategy = strategy or (lambda: GraphCapture(self._hidden.device))
        expected = self._trial()
        self._replays = Replays(strategy)
        for found, right in zip(self._trial(), expected, strict=True):
            error = (found.float() - right.float()).square().mean().sqrt()
            if not float(error) <= _TRIAL_ERROR * float(right.float().square().mean().sqrt()):
                raise ValueError("a captured segment, replayed, comes out differently")

    def run(self, hidden: Tensor, first: int, last: int, positions: Tensor, kv: KVCache) -> Tensor:
        """Layers first+1..last on [1, T, d] at `positions` [1, T]; appends T positions to `kv`.

        Positions rise by one. The rows go to the slots behind those that these layers have filled.
        """
        count, start = hidden.shape[1], kv.length(first)
        rows = _padded(count)
        kv.check_room(start + count)
        needed = kv.slots + _MOST_ROWS if kv.slots else start + (rows or count)
        with self._lock:
            self._lend(kv, needed)
            if rows is None:
                return self._generic.run(hidden, first, last, positions, kv)
            self._fill(hidden, rows)
            torch.add(self._offsets[:, :rows], positions[:, :1], out=self._positions[:, :rows])
            torch.add(self._offsets[:, :rows], start, out=self._places[:, :rows])
            seen = self._count(needed)
            output = self._replays.run(
                (first, last, rows, seen), lambda: self._segment(first, last, rows, seen)
            )
            kv.extend(count, first, last)
            return output[:, :count].clone()  # the next replay overwrites it

    def logits(self, hidden: Tensor) -> Tensor:
        """Output of layer L, [1, T, d] -> what lm_head gives, [1, T, V]."""
        if (rows := _padded(hidden.shape[1])) is None:
            return self._generic.logits(hidden)
        with self._lock:
            self._fill(hidden, rows)
            output = self._replays.run(
                (rows,), lambda: self._generic.logits(self._hidden[:, :rows])
            )
            return output[:, : hidden.shape[1]].clone()

    def _segment(self, first: int, last: int, rows: int, seen: int) -> Tensor:
        """Layers first+1..last from the fixed buffers: what is captured."""
        positions, places = self._positions[:, :rows], self._places[:, :rows]
        kinds = set(self._generic.layer_types[first:last])
        masks = {kind: self._mask(kind, places, seen) for kind in kinds}
        view = SlotView(self._slots, places, seen)
        hidden = self._hidden[:, :rows]
        return self._generic.run_layers(hidden, first, last, positions, view, masks)

    def _mask(self, kind: str, places: Tensor, seen: int) -> Tensor:
        """[1, 1, rows, seen] as transformers makes it, but from slots on the device, [1, rows]."""
        config = self._decoder.config
        behind = places[0, :, None] - torch.arange(seen, device=places.device)
        visible = behind >= 0
        if kind == SLIDING:
            visible &= behind < config.sliding_window
        if config._attn_implementation == "eager":
            lowest = torch.finfo(self._hidden.dtype).min
            zero = self._hidden.new_zeros(())
            return torch.where(visible, zero, lowest)[None, None]
        return visible[None, None]

    def _fill(self, hidden: Tensor, rows: int) -> None:
        """Copy [1, T, d] into the fixed buffer, zeros behind it up to `rows`."""
        count = hidden.shape[1]
        self._hidden[:, :count] = hidden
        if count < rows:
            # what lay there may be NaN, which masks let through; assigning uploads (torch 2.11)
            self._hidden[:, count:rows].zero_()

    def _lend(self, kv: KVCache, needed: int) -> None:
        """Have `kv` in the slots, with room for `needed` positions."""
        if needed > self._slots.slots:
            self._slots.recall()
            # dropped before the new ones are made: both at once may not fit the device
            self._slots = StaticSlots(self._samples, 0)
            self._replays.clear()
            self._slots = StaticSlots(self._samples, self._count(needed))
            logger.info("keys and values now take %d MB", self.nbytes // 1_000_000)
        self._slots.lend(kv)

    def _count(self, needed: int) -> int:
        """Slots for `needed` positions: few distinct counts, and none beyond what is ever used."""
        count = max(_FEWEST_SEEN, 1 << (needed - 1).bit_length())
        return self._limit if needed <= self._limit < count else count

    @torch.no_grad()
    def _one_position(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of one token, per layer."""
        cache, embed = SamplingCache(self._num_layers), self._decoder.embed_tokens
        first = torch.zeros(1, 1, dtype=torch.int64, device=embed.weight.device)
        self._generic.run(embed(first), 0, self._num_layers, first, cache)
        return [cache.samples[layer] for layer in range(self._num_layers)]

    @torch.no_grad()
    def _trial(self) -> list[Tensor]:
        """Outputs and logits of a few passes over one text, at the first and the last positions."""
        found, count = [], sum(_TRIAL_ROWS)
        weight = self._decoder.embed_tokens.weight
        ids = torch.arange(count, device=weight.device)[None] % len(weight)
        for start in (0, max(0, int(self._decoder.config.max_position_embeddings) - count)):
            kv = KVCache(self._num_layers)
            places = torch.arange(start, start + count, device=weight.device)[None]
            blocks = zip(ids.split(_TRIAL_ROWS, 1), places.split(_TRIAL_ROWS, 1), strict=True)
            for block, positions in blocks:
                hidden = self._decoder.embed_tokens(block)
                found.append(self.run(hidden, 0, self._num_layers, positions, kv))
                found.append(self.logits(found[-1]))
        return found


def _padded(count: int) -> int | None:
    """Rows of the captured pass that `count` rows run in; None: they run uncaptured."""
    return next((rows for rows in ROW_COUNTS if rows >= count), None)


def _require_one_device(decoder: Any, lm_head: nn.Module) -> None:
    """Raise ValueError unless all weights are on one device."""
    devices = {weight.device for part in (decoder.module, lm_head) for weight in part.parameters()}
    if len(devices) != 1:
        raise ValueError(f"weights are on {len(devices)} devices, expected one")
