"""What a setting would gain: exit statistics and measured costs in, an expected speed-up out.

SpecBound's speed-up formula (shared reading: E[tokens] = (1 - a^(k+1)) / (1 - a), a round costs
k D_max / L + (L - D_max) / L) with what a machine really does put in: costs by number of rows,
heads that cost time, several exit layers, drafts that stop early. Called by `calibrate`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec.decoding.prices import Costs


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
    tokens, reached, alive, difficult = 1.0, 1.0, 1.0, 0.0
    passes: list[tuple[int, float, float]] = []
    heads = 0.0
    for place in range(width):
        found = first if place == 0 else later
        alive *= found.right
        tokens += alive
        asked = list(_asked(layers, found, reached))
        heads += sum(chance for chance, _ in asked)
        passes += [(place + 1, chance, chance * run) for chance, run in asked if run]
        difficult += reached * (1.0 - sum(found.at))
        reached *= sum(found.at)
    # a difficult token, and all before it, have come through the shallow layers already
    deep = costs.num_layers - difficult * layers[-1]
    seconds = costs.seconds([*passes, (width + 1, 1.0, deep)], [(width + 1, 1.0)], heads)
    return tokens, tokens * costs.plain_step() / seconds


def best_setting(
    costs: Costs,
    candidates: Mapping[int, Sequence[float]],
    evaluate: Callable[[tuple[int, ...], tuple[float, ...]], tuple[Exits, Exits]],
    most_layers: int = 2,
) -> Setting:
    """The fastest of all settings: at most `most_layers` exit layers, each with its thresholds.

    Drafts are as long as the rows whose costs were measured allow.
    """
    found: list[Setting] = []
    for count in range(1, most_layers + 1):
        for layers in itertools.combinations(sorted(candidates), count):
            for taus in itertools.product(*(candidates[layer] for layer in layers)):
                first, later = evaluate(layers, taus)
                for width in range(1, len(costs.layers)):
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


def _asked(layers: Sequence[int], found: Exits, reached: float) -> Iterator[tuple[float, int]]:
    """By exit layer: the chance that its head is asked, and the layers that are run for it."""
    staying, depth = reached, 0
    for layer, leaves in zip(layers, found.at, strict=True):
        yield staying, layer - depth
        staying, depth = staying - reached * leaves, layer
