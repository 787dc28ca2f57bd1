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

from selfspec.decoding.grammar import GrammarMask
from selfspec.decoding.one_row import STATELESS, called, processor_for
from selfspec.errors import InvalidOption

_BITS = 2**64 - 1

_UNKNOWN = -3e4
"""Of a token that a head does not know, where it must choose among such; in any number format."""


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
    """Source of draws that no seed ties; None is torch's global one."""
    seed: int | None = None
    """Ties each draw to its position: the token is a function of the law there, and of this."""
    pad: int = 0
    """Padding ids in front of a text, which count for no position."""
    least: float | None = None
    """What logits are raised to before processors see them; None: they stay."""

    @property
    def grammar(self) -> GrammarMask | None:
        """What the text has to follow, if anything."""
        return next((one for one in self.processors if isinstance(one, GrammarMask)), None)

    @property
    def is_plain_greedy(self) -> bool:
        """The most likely token, and nothing changes the logits."""
        return not self.do_sample and not self.processors

    def scores(self, ids: Tensor, logits: Tensor) -> Tensor:
        """Processed scores of the token after `ids` [1, n]; [1, V] -> [1, V].

        Raises InvalidOption for what a processor of transformers refuses, and for results of
        another shape. What a processor of the user's raises goes on as it is.
        """
        scores = logits if self.least is None else logits.clamp(min=self.least)
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
            return Choice(self.draw(probs, ids.shape[1]), probs, probs)
        return Choice(int(scores.argmax(-1)), None, probs)

    def draw(self, probs: Tensor, place: int | None = None) -> int:
        """One token from [V], behind `place` ids, to which a seed ties it; None: to no place.

        Raises InvalidOption where [V] is no law.
        """
        generator = self.generator
        if self.seed is not None and place is not None:
            # of one draw torch makes a race: the largest p / t, for [V] exponential times t
            generator = torch.Generator(probs.device)
            generator.manual_seed(mixed(self.seed, place - self.pad))
        try:
            return int(torch.multinomial(probs, 1, generator=generator))
        except RuntimeError as error:
            raise InvalidOption(
                "the scores hold no law to draw from: all tokens are ruled out, or a number is NaN "
                "or infinite. Check temperature, guidance_scale and logits_processor"
            ) from error

    def uniform(self, device: torch.device) -> Tensor:
        """One number from [0, 1), a tensor without dimensions."""
        return torch.rand((), device=device, generator=self.generator)

    def for_drafts(self) -> Sampler:
        """The same choice with only the processors that may look at tokens never committed.

        A head may know few of the tokens that a grammar allows, or none: then all are alike.
        """
        kept = [p for p in self.processors if is_stateless(p)]
        least = None if self.grammar is None else _UNKNOWN
        return replace(self, processors=LogitsProcessorList(kept), least=least)

    def for_row(self, row: int, rows: int, pad: int = 0) -> Sampler:
        """The choice for one row of a batch of `rows`, which has `pad` padding ids in front.

        Row r draws with the seed plus r, so that it can be made again by itself. Raises
        InvalidOption for a processor that is not known to treat each row by itself.
        """
        if rows == 1:
            return replace(self, pad=pad)
        alone = [processor_for(processor, row, rows) for processor in self.processors]
        own = replace(self, processors=LogitsProcessorList(alone), pad=pad)
        if self.seed is None or self.generator is None:
            return own
        return own.seeded((self.seed + row) & _BITS, self.generator.device)

    def seeded(self, seed: int, device: torch.device) -> Sampler:
        """The same choice with draws from a seed."""
        generator = torch.Generator(device).manual_seed(seed)
        return replace(self, seed=seed, generator=generator)


def mixed(seed: int, place: int) -> int:
    """A seed for one place: of 64 bits, with all of which each bit of both changes half.

    The finaliser of splitmix64 (Steele, Lea and Flood 2014, "Fast Splittable Pseudorandom Number
    Generators"), behind one step for the seed and one for the place.
    """
    found = seed
    for step in (0, place):
        found = (found + (step + 1) * 0x9E3779B97F4A7C15) & _BITS
        found = ((found ^ (found >> 30)) * 0xBF58476D1CE4E5B9) & _BITS
        found = ((found ^ (found >> 27)) * 0x94D049BB133111EB) & _BITS
        found ^= found >> 31
    return found


def is_stateless(processor: object) -> bool:
    """Whether calls do not affect each other: most of Hugging Face's own processors.

    The user's own code is taken to keep state unless its class says `stateless = True`. Leaving
    one out on the draft side costs acceptance, never correctness: the target side always runs all.
    """
    kind = type(processor)
    if getattr(kind, "stateless", False) is True:
        return True
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
