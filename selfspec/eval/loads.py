"""What a method did with many texts at once, and tables of it.

Made by `concurrency`; shown by `selfspec bench --concurrency`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any

from selfspec.eval.metrics import ratio_interval


@dataclass(kw_only=True)
class Load:
    """What a method did with all prompts, so many at once."""

    method: str = ""
    texts: int
    repeat: int = 0
    seconds: float = 0.0
    tokens: int = 0
    steps_s: float = 0.0
    """Of rounds in which as many texts as asked for are written and no prompt enters."""
    steps_tokens: int = 0
    first_s: list[float] = field(default_factory=list)
    """From a prompt's arrival to its first token; where that can be seen."""
    gaps_s: list[float] = field(default_factory=list)
    """Between rounds of a text."""
    same: int = 0
    """Answers that are those of plain decoding alone."""

    @property
    def tokens_per_s(self) -> float:
        """With prompts."""
        return self.tokens / self.seconds

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Behind the prompts, all places taken."""
        return self.steps_tokens / self.steps_s if self.steps_tokens else None

    def summary(self) -> dict[str, Any]:
        """For a file: figures, without the lists."""
        kept = asdict(self)
        first, gaps = kept.pop("first_s"), kept.pop("gaps_s")
        return kept | {
            "tokens_per_s": self.tokens_per_s,
            "decode_tokens_per_s": self.decode_tokens_per_s,
            "first_s": _middle_and_tail(first),
            "gaps_s": _middle_and_tail(gaps),
        }


def table(loads: Sequence[Load]) -> str:
    """Markdown: tokens per second by method and number of texts, then waiting; medians."""
    counts = sorted({load.texts for load in loads})
    names = list(dict.fromkeys(load.method for load in loads))
    parts: list[tuple[str, Callable[[Sequence[Load]], str]]] = [
        ("tokens/s, prompts included", lambda some: _middle([one.tokens_per_s for one in some])),
        (
            "tokens/s behind the prompts",
            lambda some: _middle([one.decode_tokens_per_s for one in some]),
        ),
        ("first token, s: p50 / p95", lambda some: _pair([one.first_s for one in some])),
        ("between rounds, s: p50 / p95", lambda some: _pair([one.gaps_s for one in some])),
        ("answers as alone, at least", lambda some: str(min(one.same for one in some))),
    ]
    lines = []
    for title, show in parts:
        lines += _head(title, counts)
        for name in names:
            cells = [_cell(loads, name, count, show) for count in counts]
            lines.append(f"| {name} | {' | '.join(cells)} |")
        lines.append("")
    if any(load.repeat for load in loads):
        lines += _head("tokens/s behind the prompts, against plain (95 % interval)", counts)
        for name in names:
            ratios = [_against_plain(loads, name, count) for count in counts]
            if name != "plain" and any(ratios):
                lines.append(f"| {name} | {' | '.join(ratios)} |")
        lines.append("")
    return "\n".join(lines)


def _head(title: str, counts: Sequence[int]) -> list[str]:
    return [f"| {title} | {' | '.join(map(str, counts))} |", "| --- |" + " ---: |" * len(counts)]


def _cell(
    loads: Sequence[Load], name: str, count: int, show: Callable[[Sequence[Load]], str]
) -> str:
    some = [load for load in loads if (load.method, load.texts) == (name, count)]
    return show(some) if some else ""


def _against_plain(loads: Sequence[Load], name: str, count: int) -> str:
    """A method and plain decoding, paired by repeat."""
    here = sorted((load for load in loads if load.texts == count), key=lambda load: load.repeat)
    plain, other = (
        [1 / rate for load in here if load.method == one and (rate := load.decode_tokens_per_s)]
        for one in ("plain", name)
    )
    if not plain or len(plain) != len(other):
        return ""
    low, high = ratio_interval(plain, other)
    return f"{sum(plain) / sum(other):.2f} ({low:.2f} to {high:.2f})"


def _middle_and_tail(seconds: Sequence[float]) -> tuple[float, float] | None:
    if not seconds:
        return None
    ordered = sorted(seconds)
    return statistics.median(ordered), ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]


def _middle(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.0f}" if known else ""


def _pair(seconds: Sequence[Sequence[float]]) -> str:
    found = _middle_and_tail(list(chain.from_iterable(seconds)))
    return "" if found is None else f"{found[0]:.3f} / {found[1]:.3f}"
