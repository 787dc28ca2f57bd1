"""Scripted drafters: they ask no heads, so any draft can be planted.

Called by `lossless`, and by the tests of the decoding loop.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from selfspec.decoding.drafters import Draft
from selfspec.decoding.sequence import DecodeState
from selfspec.decoding.stats import Ended, Stopwatch
from selfspec.decoding.work import Steps, ready
from selfspec.model.rows import depths


class ScriptedDrafter:
    """Base: `width` is W_max; subclasses say which tokens."""

    def __init__(self, width: int = 4) -> None:
        self.width = width

    def draft(self, state: DecodeState, limit: int, watch: Stopwatch) -> Steps[Draft]:  # noqa: ARG002  # the protocol's
        """At most min(limit, width) tokens, none of which ran through a layer."""
        room = max(min(limit, self.width), 0)
        tokens = self.tokens(state.length - state.pad, room)[:room]
        ended: Ended = "width" if len(tokens) == self.width else "budget"
        return ready(Draft(tokens=tokens, exit_layers=[0] * len(tokens), ended=ended))

    def learn(self, draft: Draft, kept: Sequence[int]) -> None:
        """The script stays as it is."""

    def tokens(self, position: int, count: int) -> list[int]:
        """Tokens for `position` and behind it, up to `count`."""
        raise NotImplementedError


class OracleDrafter(ScriptedDrafter):
    """Drafts the known continuation. `sequence` holds the prompt (without padding) and all of it.

    Goes by position, so it also serves where the decoder has parted from `sequence`.
    """

    def __init__(self, sequence: Sequence[int], width: int = 4) -> None:
        super().__init__(width)
        self.sequence = list(sequence)

    def tokens(self, position: int, count: int) -> list[int]:
        """What the continuation holds there, fewer at its end."""
        return self.sequence[position : position + count]


class WrongDrafter(OracleDrafter):
    """Drafts what the known continuation does not hold there, and junk behind its end."""

    def __init__(self, sequence: Sequence[int], vocab_size: int, width: int = 4) -> None:
        super().__init__(sequence, width)
        self.vocab_size = vocab_size

    def tokens(self, position: int, count: int) -> list[int]:
        """`count` tokens, each next to the true one."""
        truth = super().tokens(position, count)
        padded = truth + [0] * (count - len(truth))
        return [(token + 1) % self.vocab_size for token in padded]


class RandomDrafter(ScriptedDrafter):
    """Drafts 0..width random tokens."""

    def __init__(self, seed: int, vocab_size: int, width: int = 4) -> None:
        super().__init__(width)
        self.vocab_size = vocab_size
        self.generator = torch.Generator().manual_seed(seed)

    def tokens(self, position: int, count: int) -> list[int]:  # noqa: ARG002  # the base's
        """Random tokens, a random number of them."""
        return self.junk(self.number(count + 1))

    def number(self, end: int) -> int:
        """A random number from 0..end-1."""
        return int(torch.randint(end, (), generator=self.generator))

    def junk(self, count: int) -> list[int]:
        """`count` random tokens."""
        shape = (count,)
        return torch.randint(self.vocab_size, shape, generator=self.generator).tolist()


class MixedDrafter(RandomDrafter):
    """Drafts a true prefix of random length, then random tokens up to the full width."""

    def __init__(self, sequence: Sequence[int], seed: int, vocab_size: int, width: int = 4) -> None:
        super().__init__(seed, vocab_size, width)
        self.sequence = list(sequence)

    def tokens(self, position: int, count: int) -> list[int]:
        """`count` tokens, the first few of them right."""
        truth = self.sequence[position : position + self.number(count + 1)]
        return truth + self.junk(count - len(truth))


_RIGHT = 5
"""Right tokens of a planted tree at most: there is room for others beside them."""


class BranchingDrafter(MixedDrafter):
    """Plants a true prefix of random length in a random tree of other tokens.

    Where there are exit layers, the first rows wait at some of them, as if they had left there.
    """

    def draft(self, state: DecodeState, limit: int, watch: Stopwatch) -> Steps[Draft]:  # noqa: ARG002  # the protocol's
        """Up to `width` tokens, whose paths fit into `limit`."""
        position = state.length - state.pad
        right = self.sequence[position : position + self.number(min(max(limit, 0), _RIGHT) + 1)]
        tokens: list[int] = []
        parents: list[int] = []
        below = -1  # the newest of the right ones
        placed = 0
        while len(tokens) < self.width and limit > 0:
            if placed < len(right) and self.number(5) < 3:
                tokens.append(right[placed])
                parents.append(below)
                below, placed = len(tokens) - 1, placed + 1
                continue
            parent = self.number(len(tokens) + 1) - 1
            if parent < 0 or depths(parents)[parent] + 1 < limit:
                tokens += self.junk(1)
                parents.append(parent)
        draft = Draft(tokens=tokens, parents=parents, ended="width" if tokens else "budget")
        yield from self._run_trunk(state, draft)
        return draft

    def _run_trunk(self, state: DecodeState, draft: Draft) -> Steps[None]:
        """A random number of rows of the first path, each to a random exit layer."""
        exits = len(state.hidden.schedule.depths) - 2
        trunk = [*state.committed(-1), *draft.tokens[: draft.trunk]]
        for token in trunk[: self.number(len(trunk) + 1) if exits else 0]:
            state.hidden.push(state.backbone.embed(state.ids.new_tensor([token])))
            for boundary in range(self.number(exits) + 1):
                yield from state.hidden.advance(boundary)
