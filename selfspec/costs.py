"""What layers, logits and heads cost here: a model and its heads come in, seconds go out.

Called by `training.calibrate` and `eval.tune`, which choose settings by it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec.backbone import Backbone
from selfspec.heads import ExitHeads
from selfspec.kv_cache import KVCache

_CONTEXT = 256
_REPEATS = 15
MAX_DRAFT_TOKENS = 7
"""Longest draft considered: 8 rows are as many as a pinned pass has."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds, measured on this machine."""

    num_layers: int
    layers: tuple[float, ...]
    """All L layers, for 1, 2, ... rows."""
    logits: tuple[float, ...]
    """The model's own head, for 1, 2, ... rows."""
    head: float
    """One exit head on one row, and the judge."""

    def plain_step(self) -> float:
        """One token without drafts."""
        return self.layers[0] + self.logits[0]

    def run(self, count: float, rows: int) -> float:
        """`count` layers on `rows` rows."""
        return self.layers[rows - 1] * count / self.num_layers


@torch.inference_mode()
def measure(
    backbone: Backbone, heads: ExitHeads, now: Callable[[], float] = time.perf_counter
) -> Costs:
    """Medians of 15 interleaved passes behind a context of 256 tokens."""
    kv = KVCache(backbone.num_layers)
    most = MAX_DRAFT_TOKENS + 1
    block = torch.zeros(1, _CONTEXT, dtype=torch.int64, device=backbone.device)
    hidden = backbone.embed(block)
    last = _layers(backbone, hidden, kv)
    head = heads[heads.config.exit_layers[0]]
    deep = last[:, -1] if heads.reads_deep else None
    seconds: dict[tuple[str, int], list[float]] = {}

    def clocked(name: str, rows: int, work: Callable[[], object]) -> None:
        start = now()
        work()
        if backbone.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.setdefault((name, rows), []).append(now() - start)

    for _ in range(_REPEATS):
        for rows in range(1, most + 1):
            width = max(rows, backbone.min_rows)
            part, ends = hidden[:, :width], last[:, :width]
            clocked("layers", rows, lambda part=part: _layers(backbone, part, kv))  # type: ignore[misc]
            kv.truncate(_CONTEXT)
            clocked("logits", rows, lambda ends=ends: backbone.logits(ends))  # type: ignore[misc]
        clocked("head", 1, lambda: head(last[:, -1], deep).softmax(-1).amax().item())
    middle = {key: statistics.median(values) for key, values in seconds.items()}
    return Costs(
        num_layers=backbone.num_layers,
        layers=tuple(middle["layers", rows] for rows in range(1, most + 1)),
        logits=tuple(middle["logits", rows] for rows in range(1, most + 1)),
        head=middle["head", 1],
    )


def _layers(backbone: Backbone, hidden: Tensor, kv: KVCache) -> Tensor:
    start = kv.length(0)
    positions = torch.arange(start, start + hidden.shape[1], device=hidden.device)[None]
    return backbone.run(hidden, 0, backbone.num_layers, positions, kv)
