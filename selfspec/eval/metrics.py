"""Statistics of measured runs: numbers come in, rates with their intervals go out.

Nothing here knows a method, a file or a model. Called by `bench` and `summary`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

RESAMPLES = 2000
"""Of a bootstrap. By another seed an end of its interval moves by about 6 % of the ratio's standard
error: sqrt(0.025 x 0.975 / 2000) over the normal density at 1.96."""

LOOPING = 0.3
"""An answer loops when more than this share of its 8-grams are repeats."""

Arrivals = Sequence[tuple[int, float]]
"""Tokens that arrived together, and seconds since the ones before."""


@dataclass(frozen=True, kw_only=True)
class SpeedUp:
    """SD: how often one method fits into the time of another, over the same tokens."""

    ratio: float
    """Of total wall times: what a user of all these prompts would see."""
    low: float
    """Lower end of the 95 % interval of `ratio`: bootstrap over prompts, paired."""
    high: float
    """Its upper end."""
    mean: float
    """Of the prompts' own ratios."""
    p5: float
    """5th percentile of the prompts' own ratios."""
    worst: float
    """The smallest of them."""
    prompts: int


def speed_up(base: Mapping[str, float], method: Mapping[str, float], seed: int = 0) -> SpeedUp:
    """Seconds by prompt of both, the same prompts. Raises ValueError where they are not."""
    if base.keys() != method.keys() or not base:
        raise ValueError(f"{len(base)} and {len(method)} prompts, expected the same and some")
    above = [base[prompt] for prompt in base]
    below = [method[prompt] for prompt in base]
    ratios = [one / other for one, other in zip(above, below, strict=True)]
    low, high = ratio_interval(above, below, seed)
    return SpeedUp(
        ratio=sum(above) / sum(below),
        low=low,
        high=high,
        mean=sum(ratios) / len(ratios),
        p5=percentile(ratios, 0.05),
        worst=min(ratios),
        prompts=len(ratios),
    )


def ratio_interval(
    above: Sequence[float], below: Sequence[float], seed: int = 0, share: float = 0.95
) -> tuple[float, float]:
    """Percentile bootstrap interval of sum(above) / sum(below), resampling pairs.

    Pairs keep what a prompt has in common for both; the seed makes it repeatable.
    """
    pairs = torch.tensor([above, below], dtype=torch.float64)  # [2, N]
    generator = torch.Generator().manual_seed(seed)
    count = pairs.shape[1]
    drawn = torch.randint(count, (RESAMPLES, count), generator=generator)
    sums = pairs[:, drawn].sum(-1)  # [2, resamples]
    ends = torch.tensor([(1 - share) / 2, (1 + share) / 2], dtype=torch.float64)
    low, high = torch.quantile(sums[0] / sums[1], ends).tolist()
    return low, high


def percentile(values: Sequence[float], share: float) -> float:
    """Between the two nearest values, linearly; `share` in 0..1."""
    return float(torch.quantile(torch.tensor(values, dtype=torch.float64), share))


def compression_rate(runs: Iterable[Arrivals]) -> float:
    """CR: tokens per verification over all runs; the first arrival is the prompt's. 0 without."""
    later = [count for arrivals in runs for count, _ in arrivals[1:]]
    return sum(later) / len(later) if later else 0.0


def token_seconds(arrivals: Arrivals) -> list[float]:
    """What each token behind the first arrival took.

    Tokens of a round arrive together: each is charged an equal share of the round's seconds.
    """
    return [seconds / count for count, seconds in arrivals[1:] for _ in range(count)]


def acceptance(
    drafted: Iterable[Mapping[str, float]], accepted: Iterable[Mapping[str, float]]
) -> dict[int, tuple[int, int]]:
    """Drafted and accepted by exit layer, or by index, summed over runs; in rising order."""
    total: Counter[int] = Counter()
    kept: Counter[int] = Counter()
    for counter, entries in ((total, drafted), (kept, accepted)):
        for entry in entries:
            counter.update({int(key): int(count) for key, count in entry.items()})
    return {key: (total[key], kept[key]) for key in sorted(total)}


def repeated_share(tokens: Sequence[int], length: int = 8) -> float:
    """Share of n-grams that occurred before, 0..1; 0 where the text is shorter than one."""
    grams = [tuple(tokens[at : at + length]) for at in range(len(tokens) - length + 1)]
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0
