"""How near a plain step comes to the memory's limit: a backbone comes in, a StepSpeed goes out.

Every weight and every kept key and value is read once per token, so no step is faster than those
bytes at the memory's rate. Called by `selfspec env --model` and by eval/step_speed.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from selfspec.decoding.clock import Clock
from selfspec.decoding.hidden_cache import HiddenCache
from selfspec.decoding.work import alone
from selfspec.model.backbone import Backbone
from selfspec.model.kv_store import Lease

ROWS = (1, 2, 4, 8, 16)

CONTEXT = 256

_REPEATS = 7

_CPU_BYTES, _OTHER_BYTES = 400_000_000, 1 << 30
"""Read to measure the memory's rate: more than caches hold."""


@dataclass(frozen=True, kw_only=True)
class StepSpeed:
    """One model, as one executor runs it here. Seconds and rates are medians."""

    context_tokens: int
    """Positions in front of the rows."""
    weight_bytes: int
    """Weights of all layers and of the unembedding, as the executor keeps them."""
    kv_bytes: int
    """Keys and values of the context."""
    memory_bytes_per_s: float
    """At which all threads, or the accelerator, read numbers that no cache holds."""
    rows_s: dict[int, float]
    """Seconds of a pass through all layers, to the best token of each row, by rows."""

    @property
    def step_bytes(self) -> int:
        """What a plain step reads."""
        return self.weight_bytes + self.kv_bytes

    @property
    def limit_s(self) -> float:
        """Seconds that reading those bytes takes: no step is faster."""
        return self.step_bytes / self.memory_bytes_per_s

    @property
    def step_s(self) -> float:
        """Seconds of a plain step: one row."""
        return self.rows_s[1]

    @property
    def share_of_limit(self) -> float:
        """Speed of a plain step as a share of what the memory allows.

        Above 1 where a cache holds the weights.
        """
        return self.limit_s / self.step_s

    @property
    def rows_in_steps(self) -> dict[int, float]:
        """Cost of a pass by its rows, 2 and more, in passes of one row."""
        return {rows: seconds / self.step_s for rows, seconds in self.rows_s.items() if rows > 1}

    def to_dict(self) -> dict[str, Any]:
        """All figures, ready for JSON."""
        return asdict(self) | {
            "step_bytes": self.step_bytes,
            "limit_s": self.limit_s,
            "step_s": self.step_s,
            "share_of_limit": self.share_of_limit,
            "rows_in_steps": self.rows_in_steps,
        }


@torch.inference_mode()
def step_speed(
    backbone: Backbone, *, context: int = CONTEXT, clock: Clock | None = None
) -> StepSpeed:
    """Measured behind `context` tokens, fewer where the model has no room for them; a few seconds.

    Passes are padded as the runtime pads them, and timed in turns.
    """
    clock = clock or Clock(backbone.device, _REPEATS)
    room = backbone.max_positions
    context = max(1, min(context, room - ROWS[-1]))
    passes = Passes(backbone, context, most=ROWS[-1])
    counts = [rows for rows in ROWS if rows == 1 or context + rows <= room]
    return StepSpeed(
        context_tokens=context,
        weight_bytes=backbone.weight_bytes,
        kv_bytes=passes.lease.nbytes,
        memory_bytes_per_s=memory_rate(clock),
        rows_s=clock.seconds({rows: partial(passes.run, rows) for rows in counts}),
    )


def memory_rate(clock: Clock) -> float:
    """Bytes per second of a sum over float32 numbers that no cache holds."""
    size = _CPU_BYTES if clock.device.type == "cpu" else _OTHER_BYTES
    numbers = torch.ones(size // 4, device=clock.device)
    read: Callable[[], object] = numbers.sum
    return numbers.nbytes / clock.seconds({"read": read})["read"]


class Passes:
    """Passes of up to `most` rows behind one context."""

    def __init__(self, backbone: Backbone, context: int, *, most: int) -> None:
        """Runs the context."""
        self._backbone = backbone
        self._context = context
        self.lease = Lease(backbone.num_layers)
        self._hidden = HiddenCache(backbone, self.lease)
        self.ids = torch.arange(context + most, device=backbone.device) % backbone.vocab_size
        """Of the context, then of the rows."""
        self._hidden.push(backbone.embed(self.ids[:context]))
        alone(self._hidden.advance_all())

    def run(self, rows: int) -> list[int]:
        """The best token behind each of `rows` rows, read back; the lease stays as it was."""
        hidden, backbone = self._hidden, self._backbone
        hidden.clear()
        hidden.push(backbone.embed(self.ids[self._context :][:rows]))
        target = alone(hidden.unembed(alone(hidden.advance_all())))
        self.lease.truncate(self._context)
        return target.best
