"""Planted drafts, greedy decoding with them, and rules that are heard: what losslessness is put to.

Called by `verify`, and by the tests of the decoding loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from selfspec.api.request import Request
from selfspec.api.speculator import Speculator
from selfspec.api.text import Prompt
from selfspec.config import SpeculationOptions
from selfspec.decoding.acceptance import AcceptanceRule, Draft, Heard
from selfspec.decoding.engine import Engine, Runtime
from selfspec.decoding.sampling import Sampler
from selfspec.decoding.state import DecodeState, Drafter, Steps, ready
from selfspec.decoding.stats import Ended, Stopwatch
from selfspec.model.kv import depths

_EAGER = 1e-6
"""A threshold that every token reaches: all exits are taken, also the wrong ones."""

_RIGHT = 5
"""Right tokens of a planted tree at most: there is room for others beside them."""


class ScriptedDrafter:
    """Base: subclasses say which tokens. No head is asked.

    `sequence`: the prompt (without padding) and its known continuation. Drafts go by position, so
    they also serve where the decoder has parted from it. `width` is W_max.
    """

    def __init__(
        self, sequence: Sequence[int] = (), seed: int = 0, vocab_size: int = 1, width: int = 4
    ) -> None:
        self.sequence, self.vocab_size, self.width = list(sequence), vocab_size, width
        self._generator = torch.Generator().manual_seed(seed)

    def draft(self, state: DecodeState, limit: int, watch: Stopwatch) -> Steps[Draft]:  # noqa: ARG002  # the protocol's
        """At most min(limit, width) tokens, none of which ran through a layer."""
        room = max(min(limit, self.width), 0)
        tokens = self._tokens(state.length - state.pad, room)[:room]
        ended: Ended = "width" if len(tokens) == self.width else "budget"
        return ready(Draft.of(tokens, ended=ended))

    def learn(self, draft: Draft, kept: Sequence[int]) -> None:
        """The script stays as it is."""

    def _tokens(self, position: int, count: int) -> list[int]:
        raise NotImplementedError

    def _number(self, end: int) -> int:
        return int(torch.randint(end, (), generator=self._generator))

    def _junk(self, count: int) -> list[int]:
        return torch.randint(self.vocab_size, (count,), generator=self._generator).tolist()


class OracleDrafter(ScriptedDrafter):
    """Drafts the known continuation, fewer tokens at its end."""

    def _tokens(self, position: int, count: int) -> list[int]:
        return self.sequence[position : position + count]


class WrongDrafter(ScriptedDrafter):
    """Drafts tokens next to the true ones, and junk behind the end of what is known."""

    def _tokens(self, position: int, count: int) -> list[int]:
        truth = self.sequence[position : position + count]
        padded = truth + [0] * (count - len(truth))
        return [(token + 1) % self.vocab_size for token in padded]


class RandomDrafter(ScriptedDrafter):
    """Drafts 0..width random tokens."""

    def _tokens(self, position: int, count: int) -> list[int]:  # noqa: ARG002  # the base's
        return self._junk(self._number(count + 1))


class MixedDrafter(ScriptedDrafter):
    """Drafts a true prefix of random length, then random tokens up to the full width."""

    def _tokens(self, position: int, count: int) -> list[int]:
        truth = self.sequence[position : position + self._number(count + 1)]
        return truth + self._junk(count - len(truth))


class BranchingDrafter(ScriptedDrafter):
    """Plants a true prefix of random length in a random tree of other tokens.

    Where there are exit layers, the first rows wait at some of them, as if they had left there.
    """

    def draft(self, state: DecodeState, limit: int, watch: Stopwatch) -> Steps[Draft]:  # noqa: ARG002  # the protocol's
        """Up to `width` tokens, whose paths fit into `limit`."""
        position = state.length - state.pad
        right = self.sequence[position : position + self._number(min(max(limit, 0), _RIGHT) + 1)]
        tokens: list[int] = []
        parents: list[int] = []
        below = -1  # the newest of the right ones
        placed = 0
        while len(tokens) < self.width and limit > 0:
            if placed < len(right) and self._number(5) < 3:
                tokens.append(right[placed])
                parents.append(below)
                below, placed = len(tokens) - 1, placed + 1
                continue
            parent = self._number(len(tokens) + 1) - 1
            if parent < 0 or depths(parents)[parent] + 1 < limit:
                tokens += self._junk(1)
                parents.append(parent)
        draft = Draft.of(tokens, parents, ended="width" if tokens else "budget")
        exits = len(state.hidden.schedule.depths) - 2
        trunk = [*state.committed(-1), *tokens[: draft.trunk]]
        for token in trunk[: self._number(len(trunk) + 1) if exits else 0]:
            state.hidden.push(state.backbone.embed(state.ids.new_tensor([token])))
            for boundary in range(self._number(exits) + 1):
                yield from state.hidden.advance(boundary)
        return draft


def planted(
    speculator: Speculator, options: SpeculationOptions, text: Sequence[int]
) -> dict[str, tuple[Drafter | None, SpeculationOptions]]:
    """Good, bad and random drafts for a prompt whose known continuation ends `text`; real exits.

    By name; a drafter of None is the heads'. Scripted ones fill a pinned pass.
    """
    size, width = speculator.backbone.vocab_size, options.pinned_rows - 1
    alone = replace(options, speculate=False)
    if speculator.backbone.mixing is not None:
        return {"no": (None, alone)}  # drafts are refused
    found: dict[str, tuple[Drafter | None, SpeculationOptions]] = {
        "oracle": (OracleDrafter(text, width=width), alone),
        "wrong": (WrongDrafter(text, 0, size, width), alone),
        "random": (RandomDrafter((), 0, size, width), alone),
        "mixed": (MixedDrafter(text, 1, size, width), options),
    }
    steady = not options.pinned or speculator.backbone.claims.steady
    if steady and speculator.backbone.runs_trees:
        found["tree"] = (BranchingDrafter(text, 2, size, width), options)
    if speculator.heads is not None and options.speculate:
        exits = {"exit": {"threshold": _EAGER, "max_tokens": width}, "costs": "row=0"}
        found |= {"heads": (None, options), "eager heads": (None, options.updated(exits))}
    return found


# --- decoding that is heard -----------------------------------------------------------------------


class Recorder(Heard):
    """An acceptance rule that keeps the target logits of every committed token."""

    def __init__(self, rule: AcceptanceRule) -> None:
        super().__init__(rule)
        self._rows: list[Tensor] = []

    @property
    def logits(self) -> Tensor:
        """The target logits of all tokens so far, [n, V]."""
        return torch.stack(self._rows)

    def note(self, logits: Tensor, token: int) -> None:  # noqa: ARG002  # the base's
        """Keep them."""
        self._rows.append(logits.clone())


class Listening(Runtime):
    """Hears how every token is committed, text by text; `drafter` in place of the usual one."""

    def __init__(self, other: Runtime, drafter: Drafter | None = None) -> None:
        super().__init__(other.backbone, other.heads, other.draft_model, other.datastore)
        self.probe = other.probe
        self.heard: list[Recorder] = []
        self._planted = drafter

    def rule(self, sampler: Sampler, options: SpeculationOptions) -> AcceptanceRule:
        """The usual one, heard."""
        self.heard.append(Recorder(super().rule(sampler, options)))
        return self.heard[-1]

    def drafter(self, *asked: Any) -> Drafter:
        """The planted one, if there is one."""
        return self._planted or super().drafter(*asked)


def greedy_request(speculator: Speculator, prompt: Prompt, new_tokens: int) -> Request:
    """At most `new_tokens` of the most likely tokens, by the model's own generation settings."""
    request = speculator.call(prompt, {"max_new_tokens": new_tokens, "do_sample": False})
    request.only()
    return request


Text = tuple[list[int], Tensor]
"""Tokens, and the target logits [n, V] that each was committed by."""


def decode(
    speculator: Speculator,
    request: Request,
    options: SpeculationOptions,
    drafter: Drafter | None = None,
) -> Text:
    """What an engine writes, with the drafts that `options` ask for, or those of `drafter`."""
    runtime = Listening(speculator.runtime, drafter)
    entries = Engine(runtime).add(request.only(), options)
    return [token for entry in entries for token in entry.tokens], runtime.heard[0].logits
