"""From logits to the scores that tokens are chosen by: Hugging Face's processors, and choice.

Processors run on true prefixes, one position at a time and once per committed token, exactly as
plain decoding calls them; so processors that keep state across calls see what they would see there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process

from selfspec.decoding.one_row import STATELESS, called, processor_for
from selfspec.errors import InvalidOption


class Choice(NamedTuple):
    """One token and where it came from."""

    token: int
    law: Tensor | None = None
    """The law it was drawn from, [V]; None: it is certain."""
    belief: Tensor | None = None
    """The law at its place, [V], drawn from or not; None: not kept."""


@dataclass(frozen=True)
class Sampler:
    """How a token is chosen from processed scores: the most likely, or drawn."""

    processors: LogitsProcessorList
    do_sample: bool = False
    generator: torch.Generator | None = None
    """Source of all draws; None is torch's global one."""

    @property
    def is_plain_greedy(self) -> bool:
        """The most likely token, and nothing changes the logits."""
        return not self.do_sample and not self.processors

    def scores(self, ids: Tensor, logits: Tensor) -> Tensor:
        """Processed scores of the token after `ids` [1, n]; [1, V] -> [1, V].

        Raises InvalidOption for what a processor of transformers refuses, and for results of
        another shape. What a processor of the user's raises goes on as it is.
        """
        scores = logits
        for processor in self.processors:
            scores = _processed(processor, ids, scores)
        return scores

    def probs(self, ids: Tensor, logits: Tensor) -> Tensor:
        """Distribution of the token after `ids` [1, n]; [1, V] -> [V], float32."""
        return self.scores(ids, logits)[0].softmax(-1)

    def choose(self, ids: Tensor, logits: Tensor, *, believe: bool = False) -> Choice:
        """A token to follow `ids` [1, n], from [1, V]; with its belief if asked to `believe`."""
        scores = self.scores(ids, logits)
        probs = scores[0].softmax(-1) if self.do_sample or believe else None
        if self.do_sample and probs is not None:
            return Choice(self.draw(probs), probs, probs)
        return Choice(int(scores.argmax(-1)), None, probs)

    def draw(self, probs: Tensor) -> int:
        """One token from [V]. Raises InvalidOption where [V] is no law."""
        try:
            return int(torch.multinomial(probs, 1, generator=self.generator))
        except RuntimeError as error:
            raise InvalidOption(
                "the scores hold no law to draw from: all tokens are ruled out, or a number is NaN "
                "or infinite. Check temperature, guidance_scale and logits_processor"
            ) from error

    def uniform(self, device: torch.device) -> Tensor:
        """One number from [0, 1), a tensor without dimensions."""
        return torch.rand((), device=device, generator=self.generator)

    def for_drafts(self) -> Sampler:
        """The same choice with only the processors that may look at tokens never committed."""
        kept = [p for p in self.processors if is_stateless(p)]
        return Sampler(LogitsProcessorList(kept), self.do_sample, self.generator)

    def for_row(self, row: int, rows: int) -> Sampler:
        """The choice for one row of a batch of `rows`, which is decoded alone.

        Raises InvalidOption for a processor that is not known to treat each row by itself.
        """
        if rows == 1:
            return self
        alone = [processor_for(processor, row, rows) for processor in self.processors]
        return replace(self, processors=LogitsProcessorList(alone))


def is_stateless(processor: object) -> bool:
    """Whether calls do not affect each other: most of Hugging Face's own processors.

    The user's own code is taken to keep state. Leaving one out on the draft side costs
    acceptance, never correctness: the target side always runs all of them.
    """
    kind = type(processor)
    return kind.__module__ == logits_process.__name__ and kind.__name__ in STATELESS


def _processed(processor: Any, ids: Tensor, scores: Tensor) -> Tensor:
    """[1, n], [1, V] -> [1, V]."""
    try:
        found = processor(ids, scores)
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        if type(processor).__module__ != logits_process.__name__:
            raise
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise InvalidOption(
            f"{called(processor)} refuses: {reason}. Change its option, or leave it out"
        ) from error
    if not isinstance(found, Tensor) or found.shape != scores.shape:
        shape = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise InvalidOption(
            f"{called(processor)} gives {shape}, expected scores of shape {list(scores.shape)}"
        )
    return found
