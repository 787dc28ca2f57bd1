"""What a setting would gain: exit statistics and measured costs in, an expected speed-up out.

SpecBound's speed-up formula (shared reading: E[tokens] = (1 - a^(k+1)) / (1 - a), a round costs
k D_max / L + (L - D_max) / L) with what a machine really does put in: costs by number of rows,
heads that cost time, several exit layers, drafts that stop early. Called by `calibrate`.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
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


@dataclass(frozen=True)
class Exits:
    """What drafting would do at one place of a round, with given layers and thresholds."""

    at: tuple[float, ...]
    """Chance to exit at each exit layer; what is missing to 1 is a difficult token."""
    right: float
    """Chance that it exits and the draft stays."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Options of the runtime, and what they should give."""

    exit_layers: tuple[int, ...]
    exit_threshold: tuple[float, ...]
    max_draft_tokens: int
    compression_rate: float
    """Tokens per verification."""
    speed_up: float
    """Over plain decoding on the same runtime."""


def exits(
    confidence: Sequence[Tensor], right: Sequence[Tensor], thresholds: Sequence[float]
) -> Exits:
    """Statistics over N positions, [N] by exit layer from shallow to deep."""
    waiting = torch.ones_like(right[0])
    at, kept = [], 0
    for sure, correct, tau in zip(confidence, right, thresholds, strict=True):
        leaves = waiting & (sure >= tau)
        at.append(leaves.double().mean().item())
        kept += int((leaves & correct).sum())
        waiting &= ~leaves
    return Exits(tuple(at), kept / len(waiting))


def expected(
    costs: Costs, layers: Sequence[int], first: Exits, later: Exits, width: int
) -> tuple[float, float]:
    """Compression rate and speed-up of drafts of at most `width` tokens.

    Places of a round are taken as independent; drafts behind a wrong one are taken to exit as
    often as others.
    """
    tokens, reached, alive = 1.0, 1.0, 1.0
    seconds, difficult = 0.0, 0.0
    for place in range(width):
        found = first if place == 0 else later
        alive *= found.right
        tokens += alive
        seconds += reached * _drafting(costs, layers, found, rows=place + 1)
        difficult += reached * (1.0 - sum(found.at))
        reached *= sum(found.at)
    verification = costs.logits[width] + costs.run(costs.num_layers, width + 1)
    saved = difficult * costs.run(layers[-1], width + 1)  # a difficult token has come that far
    return tokens, tokens * costs.plain_step() / (seconds + verification - saved)


def best_setting(
    costs: Costs,
    candidates: Mapping[int, Sequence[float]],
    evaluate: Callable[[tuple[int, ...], tuple[float, ...]], tuple[Exits, Exits]],
    most_layers: int = 2,
) -> Setting:
    """The fastest of all settings: at most `most_layers` exit layers, each with its thresholds."""
    found: list[Setting] = []
    for count in range(1, most_layers + 1):
        for layers in itertools.combinations(sorted(candidates), count):
            for taus in itertools.product(*(candidates[layer] for layer in layers)):
                first, later = evaluate(layers, taus)
                for width in range(1, MAX_DRAFT_TOKENS + 1):
                    rate, gain = expected(costs, layers, first, later, width)
                    found.append(
                        Setting(
                            exit_layers=layers,
                            exit_threshold=taus,
                            max_draft_tokens=width,
                            compression_rate=rate,
                            speed_up=gain,
                        )
                    )
    return max(found, key=lambda setting: setting.speed_up)


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


def _drafting(costs: Costs, layers: Sequence[int], found: Exits, rows: int) -> float:
    """Seconds to draft one token: each exit layer is reached by what has not left before."""
    seconds, staying, depth = 0.0, 1.0, 0
    for layer, leaves in zip(layers, found.at, strict=True):
        seconds += staying * (costs.run(layer - depth, rows) + costs.head)
        staying, depth = staying - leaves, layer
    return seconds
