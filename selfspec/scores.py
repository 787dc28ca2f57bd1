"""From logits to the scores that tokens are chosen by: Hugging Face's processors, and choice.

Processors run on true prefixes, one position at a time and once per committed token, exactly as
plain decoding calls them; so processors that keep state across calls see what they would see there.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process

_STATEFUL = (
    "SynthIDTextWatermarkLogitsProcessor",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor",
)
"""Keep state across calls: shown the committed tokens only, never a draft."""


_CALLS_THE_USER = ("PrefixConstrainedLogitsProcessor",)
"""Hand each prefix to a function of the user's own, which may keep state."""


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
        """Processed scores of the token after `ids` [1, n]; [1, V] -> [1, V]."""
        return self.processors(ids, logits) if self.processors else logits  # type: ignore[arg-type]  # annotated LongTensor upstream

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
        """One token from [V]."""
        return int(torch.multinomial(probs, 1, generator=self.generator))

    def uniform(self, device: torch.device) -> Tensor:
        """One number from [0, 1), a tensor without dimensions."""
        return torch.rand((), device=device, generator=self.generator)

    def for_drafts(self) -> Sampler:
        """The same choice with only the processors that may look at tokens never committed."""
        kept = [p for p in self.processors if is_stateless(p)]
        return Sampler(LogitsProcessorList(kept), self.do_sample, self.generator)

    def for_row(self, row: int) -> Sampler:
        """The choice for one row of a batch, decoded alone: what processors hold per row is cut."""
        return replace(self, processors=LogitsProcessorList(_cut(p, row) for p in self.processors))


def _cut(processor: LogitsProcessor, row: int) -> LogitsProcessor:
    """Hugging Face's repetition penalty skips the padding of each row: keep that of `row`."""
    lengths = getattr(processor, "prompt_ignore_length", None)
    if not isinstance(lengths, Tensor):
        return processor
    alone = copy.copy(processor)
    alone.prompt_ignore_length = lengths[row : row + 1]  # type: ignore[attr-defined]  # only some processors have it
    return alone


def is_stateless(processor: object) -> bool:
    """Whether calls do not affect each other: Hugging Face's own processors, but for a few.

    The user's own code is taken to keep state. Leaving one out on the draft side costs
    acceptance, never correctness: the target side always runs all of them.
    """
    kind = type(processor)
    own = kind.__module__ == logits_process.__name__
    return own and kind.__name__ not in (*_STATEFUL, *_CALLS_THE_USER)


def stateful(processors: Sequence[object]) -> list[str]:
    """Names of processors whose state would leak from one sequence of a batch to the next."""
    return [type(p).__name__ for p in processors if type(p).__name__ in _STATEFUL]
