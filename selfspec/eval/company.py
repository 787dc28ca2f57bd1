"""Whether a text has the same bits in any company: rung 7 of the ladder.

Comes in: a speculator and requests. Goes out: what differs between each text alone and all of them
in one engine, where they come at different times, one leaves early, and prompts enter in pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Generic, TypeVar

from torch import Tensor

from selfspec.api.request import Request
from selfspec.api.speculator import Speculator
from selfspec.config import SpeculationOptions
from selfspec.decoding.acceptance import AcceptanceRule
from selfspec.decoding.engine import Engine, Running
from selfspec.decoding.runtime import Runtime
from selfspec.decoding.scores import Sampler
from selfspec.eval.decoding import Recorder

_APART = 3
"""Rounds between two arrivals."""

_PATIENCE = 0.5
"""So little that most prompts enter in pieces."""


Heard = TypeVar("Heard", bound=AcceptanceRule)


class Listening(Runtime, Generic[Heard]):
    """Hears how every token is committed, text by text."""

    def __init__(self, other: Runtime, hear: Callable[[AcceptanceRule], Heard]) -> None:
        """With the same model and drafts. `hear`: the usual rule, and what it keeps."""
        super().__init__(other.backbone, other.heads, other.draft_model)
        self._hear = hear
        self.heard: list[Heard] = []

    def rule(self, sampler: Sampler, options: SpeculationOptions) -> AcceptanceRule:
        """The usual one, heard."""
        self.heard.append(self._hear(super().rule(sampler, options)))
        return self.heard[-1]


def alone(
    speculator: Speculator, request: Request, options: SpeculationOptions
) -> tuple[list[int], Tensor]:
    """Tokens, and the logits of each, of a text that nobody runs beside."""
    runtime = Listening(speculator.runtime, Recorder)
    running = Engine(runtime).add(request.only(), options)
    return [token for entry in running for token in entry.tokens], runtime.heard[0].logits


def together(
    speculator: Speculator, requests: Sequence[Request], options: SpeculationOptions
) -> list[tuple[list[int], Tensor]]:
    """The same of many, which come one after the other; the first comes twice, and leaves once."""
    runtime = Listening(speculator.runtime, Recorder)
    engine = Engine(runtime, most=len(requests) + 1, patience=_PATIENCE)
    running: list[Running] = []
    left = [requests[0], *requests]
    for step in count():
        if left and step % _APART == 0:
            running.append(engine.add(left.pop(0).only(), options))
        if step == 2 * _APART + 1:
            running[0].close()
        engine.step()
        if not left and not engine.texts:
            break
    answers = [[token for entry in one.take() for token in entry.tokens] for one in running]
    heard = [rule.logits for rule in runtime.heard]
    return list(zip(answers, heard, strict=True))[1:]
