"""Options of recording and tuning. Flags and keys of a config file are derived from them.

Imports no torch, so that `selfspec tune --help` stays fast.
"""

from __future__ import annotations

from dataclasses import dataclass

from selfspec.errors import InvalidOption

OBJECTIVES = ("speed", "latency")


@dataclass(frozen=True, kw_only=True)
class RecordOptions:
    """What is recorded, and so which settings can be replayed."""

    exit_layers: tuple[int, ...] | None = None
    """Exit layers to record. None: all that the heads were fitted for. Fewer take less time."""

    max_new_tokens: int = 64
    """Tokens of each answer, at least 2."""

    max_draft_tokens: int = 7
    """W_max of the widest setting to be replayed, at least 1."""

    min_threshold: float | None = None
    """Lowest tau to be replayed, in (0, 1]. A real round goes on behind a wrong draft: all that it
    could do there is recorded, and a lower value makes these branches many. None: 0.2, or 0.01 for
    a single exit layer, where there is one branch only."""

    anneal_strengths: tuple[float, ...] = (0.0, 0.2, 0.5, 1.0)
    """Each alpha to be replayed, at least 0, rising."""

    def __post_init__(self) -> None:
        """Raise InvalidOption for values that no record could have."""
        _require(self.max_new_tokens >= 2, "max_new_tokens", self.max_new_tokens, "at least 2")
        _require(
            self.max_draft_tokens >= 1, "max_draft_tokens", self.max_draft_tokens, "at least 1"
        )
        floor = self.min_threshold
        _require(floor is None or 0.0 < floor <= 1.0, "min_threshold", floor, "in (0, 1]")
        alphas = self.anneal_strengths
        rising = len(alphas) > 0 and list(alphas) == sorted({*alphas}) and alphas[0] >= 0.0
        _require(rising, "anneal_strengths", alphas, "that are at least 0 and rise")


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """How a setting is chosen among those replayed."""

    objective: str = "speed"
    """speed: the least time over all prompts. latency: the best 5th percentile of the prompts'
    own speed-ups, so that hardly any prompt is slower than without drafts."""

    max_exit_layers: int = 2
    """Exit layers used together at most, at least 1."""

    folds: int = 4
    """Prompts are divided into so many parts; each is judged by the setting that suits the others
    best. At least 2."""

    def __post_init__(self) -> None:
        """Raise InvalidOption for values that make no sense for any record."""
        if self.objective not in OBJECTIVES:
            known = ", ".join(OBJECTIVES)
            raise InvalidOption(f"objective is {self.objective!r}, expected one of {known}")
        _require(self.max_exit_layers >= 1, "max_exit_layers", self.max_exit_layers, "at least 1")
        _require(self.folds >= 2, "folds", self.folds, "at least 2")


def _require(condition: bool, name: str, value: object, expected: str) -> None:
    if not condition:
        raise InvalidOption(f"{name} is {value}, expected values {expected}")
