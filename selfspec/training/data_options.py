"""Options of `selfspec data`, from which its flags are derived. Imports no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

from selfspec.errors import InvalidOption


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """What a model writes into a file of conversations, and how much."""

    tokens: int | None = None
    """Answer tokens to write, at least 1; the batch that reaches them is written whole. A file may
    be continued with a higher number. None: all rows of --from."""

    batch_size: int = 128
    """Conversations that are written at once, at least 1; a killed run loses no more. On a CPU 118
    rows took 0.8 times as long per token as 59: the last of a batch to end write on alone."""

    turns: int = 1
    """User turns per conversation, at least 1. A conversation ends early where an answer is cut."""

    opening_share: float = 0.9
    """Share of the first user turns that continue one of the openings, in [0, 1]; the others are
    invented freely, and resemble each other."""

    system: str | None = None
    """System message of every conversation."""

    question_temperature: tuple[float, ...] = (0.8, 1.0)
    """Lowest and highest temperature of user turns, above 0; each batch draws one in between."""

    question_top_k: int = 100
    """User turns are drawn from this many of the likeliest tokens; 0: from all."""

    max_question_tokens: int = 256
    """Tokens of a user turn, at least 1; one that does not end within them is dropped."""

    greedy_share: float = 1.0
    """Share of the conversations that are answered greedily, in [0, 1]; the others are sampled."""

    temperature: float = 1.0
    """Temperature of sampled answers, above 0."""

    max_new_tokens: int = 400
    """Tokens of an answer, at least 1; longer ones are cut there."""

    regenerate: bool = False
    """With --from: keep the user's turns and let the model answer them itself."""

    shard: str = "1/1"
    """I/N: write the I-th of N parts. Parts share no seeds and no rows of --from."""

    seed: int = 0
    """Fixes every draw, and so the text."""

    def __post_init__(self) -> None:
        """Raise InvalidOption for values that nothing could be written with."""
        for name in ("batch_size", "turns", "max_question_tokens", "max_new_tokens"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        _require(self.tokens is None or self.tokens >= 1, "tokens", self.tokens, "at least 1")
        for name in ("opening_share", "greedy_share"):
            _require(0.0 <= getattr(self, name) <= 1.0, name, getattr(self, name), "in [0, 1]")
        low_and_high = self.question_temperature
        _require(
            len(low_and_high) == 2 and 0.0 < low_and_high[0] <= low_and_high[1],
            "question_temperature",
            ",".join(map(str, low_and_high)),
            "a lowest and a highest one, above 0",
        )
        _require(self.question_top_k >= 0, "question_top_k", self.question_top_k, "at least 0")
        _require(self.temperature > 0.0, "temperature", self.temperature, "above 0")
        _require(self.seed >= 0, "seed", self.seed, "at least 0")
        match = re.fullmatch(r"([0-9]+)/([0-9]+)", self.shard)
        inside = match is not None and 1 <= int(match[1]) <= int(match[2])
        _require(inside, "shard", self.shard, "I/N with I in 1..N")

    @property
    def part(self) -> tuple[int, int]:
        """Which part, counted from 0, of how many."""
        first, count = self.shard.split("/")
        return int(first) - 1, int(count)


def _require(condition: bool, name: str, value: object, expected: str) -> None:
    if not condition:
        raise InvalidOption(f"{name} is {value}, expected {expected}")
