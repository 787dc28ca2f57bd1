"""Prompts of unequal lengths in, what the model says next out: many texts in one engine.

Texts that have ended or fallen into a loop leave, and others take their place. Called by `selfgen`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from selfspec.config import SpeculationOptions
from selfspec.decoding.decode import StopRule
from selfspec.decoding.engine import Engine, Running
from selfspec.decoding.runtime import Asked, Runtime
from selfspec.decoding.scores import Sampler, mixed
from selfspec.decoding.sequence import DecodeState
from selfspec.decoding.stats import StopReason
from selfspec.model.backbone import Backbone

LOOP_NGRAM = 8
"""Tokens whose third occurrence makes a loop."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen."""

    temperature: float | None = None
    """None: greedy, the likeliest token."""
    top_k: int = 0
    """Draw from this many of the likeliest tokens; 0: from all."""

    def sampler(self, seed: int, device: torch.device) -> Sampler:
        """For one text."""
        if self.temperature is None:
            return Sampler(LogitsProcessorList())
        processors = LogitsProcessorList()
        if self.temperature != 1.0:
            processors.append(TemperatureLogitsWarper(self.temperature))
        if self.top_k:
            processors.append(TopKLogitsWarper(self.top_k))
        return Sampler(processors, do_sample=True).seeded(seed, device)


@dataclass(frozen=True, kw_only=True)
class _EndOrLoop(StopRule):
    """Also ends a text where it begins to repeat itself a third time."""

    places: dict[tuple[int, ...], int] = field(default_factory=dict)
    """How often each n-gram of the answer was seen."""
    prompt: int

    def reason(self, state: DecodeState, token: int) -> StopReason | None:
        """Why the text ends with its newest `token`, or None."""
        if state.length - self.prompt >= LOOP_NGRAM:
            newest = tuple(state.committed(-LOOP_NGRAM))
            self.places[newest] = self.places.get(newest, 0) + 1
            if self.places[newest] == 3:
                return "stop"
        return super().reason(state, token)


def continued(
    backbone: Backbone,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    ends: frozenset[int],
    sampling: Sampling,
    seed: int,
    watch: Callable[[int], None],
) -> list[list[int]]:
    """New ids of each prompt, at most `max_new_tokens`, with the one of `ends` that ended it.

    A text that loops is given up. What text i draws depends on `seed` and i alone. `watch` hears of
    tokens as they come. Text already seen is drafted where that pays.
    """
    engine = Engine(Runtime(backbone, None, None))
    options = SpeculationOptions(drafter="ngram")
    texts: dict[Running, list[int]] = {}
    for index, prompt in enumerate(prompts):
        asked = Asked(
            ids=torch.tensor([list(prompt)], device=backbone.device),
            sampler=sampling.sampler(mixed(seed, index), backbone.device),
            stop=_EndOrLoop(
                max_length=len(prompt) + max_new_tokens, end_tokens=ends, prompt=len(prompt)
            ),
        )
        texts[engine.add(asked, options)] = []
    while engine.texts:
        for running in engine.step():
            fresh = [token for entry in running.take() for token in entry.tokens]
            texts[running] += fresh
            watch(len(fresh))
    return list(texts.values())


def loop_start(ids: Sequence[int]) -> int | None:
    """Where the second turn of a loop begins, so that one stays; None without a loop."""
    places: dict[tuple[int, ...], list[int]] = {}
    for start in range(len(ids) - LOOP_NGRAM + 1):
        found = places.setdefault(tuple(ids[start : start + LOOP_NGRAM]), [])
        found.append(start)
        if len(found) == 3:
            return found[1]
    return None
