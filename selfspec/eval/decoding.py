"""One greedy decoding with any drafter, on a Speculator's own runtime, and what it left.

Called by `lossless`, which plants drafts, and by `dialled`, which times rounds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from selfspec.api.request import Request
from selfspec.api.speculator import Speculator
from selfspec.api.text import Prompt
from selfspec.config import SpeculationOptions
from selfspec.decoding.acceptance import AcceptanceRule, Proposed, Target, Verdict
from selfspec.decoding.decode import rounds
from selfspec.decoding.drafters import Drafter
from selfspec.decoding.runtime import acceptance_rule, tied
from selfspec.decoding.stats import Round, Stopwatch
from selfspec.eval.scripted import (
    BranchingDrafter,
    MixedDrafter,
    OracleDrafter,
    RandomDrafter,
    WrongDrafter,
)

_EAGER = 1e-6
"""A threshold that every token reaches: all exits are taken, also the wrong ones."""


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """One decoding."""

    tokens: list[int]
    entries: list[Round]
    """The prompt's pass first."""
    seconds: Counter[str]
    """By part, as `stats.PARTS` names them."""

    @property
    def decode_s(self) -> float:
        """Seconds after the prompt's pass."""
        return float(sum(self.seconds.values()) - self.seconds["prefill"])


class Recorder:
    """An acceptance rule that keeps the target logits of every committed token."""

    lossless = True

    def __init__(self, rule: AcceptanceRule) -> None:
        """`rule` decides."""
        self._rule = rule
        self._rows: list[Tensor] = []

    @property
    def logits(self) -> Tensor:
        """Of all tokens so far, [n, V]."""
        return torch.stack(self._rows)

    def verdict(
        self, ids: Tensor, target: Target, row: int, proposed: Sequence[Proposed]
    ) -> Verdict:
        """What the rule says."""
        verdict = self._rule.verdict(ids, target, row, proposed)
        self._rows.append(target.row(row)[0].clone())
        return verdict


def greedy_request(speculator: Speculator, prompt: Prompt, new_tokens: int) -> Request:
    """At most `new_tokens` of the most likely tokens, by the model's own generation settings."""
    request = speculator.call(prompt, {"max_new_tokens": new_tokens, "do_sample": False}).request
    request.only()
    return request


def decode(
    speculator: Speculator,
    request: Request,
    options: SpeculationOptions,
    drafter: Drafter | None = None,
    rule: AcceptanceRule | None = None,
) -> Decoded:
    """Decode `request`; drafter and rule are those that `options` ask for unless given."""
    runtime, asked, watch = speculator.runtime, request.only(), Stopwatch()
    asked = replace(asked, sampler=tied(asked.sampler, options))
    entries = list(
        rounds(
            runtime.state(asked, options),
            drafter or runtime.drafter(asked, options),
            rule or acceptance_rule(asked.sampler, options),
            asked.stop,
            watch,
        )
    )
    tokens = [token for entry in entries for token in entry.tokens]
    return Decoded(tokens=tokens, entries=entries, seconds=watch.seconds)


def decode_recorded(
    speculator: Speculator,
    request: Request,
    options: SpeculationOptions,
    drafter: Drafter | None = None,
) -> tuple[list[int], Tensor]:
    """Tokens, and the target logits that each was committed by, [n, V]."""
    rule = Recorder(acceptance_rule(request.sampler, options))
    return decode(speculator, request, options, drafter, rule).tokens, rule.logits


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
        "oracle": (OracleDrafter(text, width), alone),
        "wrong": (WrongDrafter(text, size, width), alone),
        "random": (RandomDrafter(0, size, width), alone),
        "mixed": (MixedDrafter(text, 1, size, width), options),
    }
    steady = not options.pinned or speculator.backbone.claims.steady
    if steady and speculator.backbone.runs_trees:
        found["tree"] = (BranchingDrafter(text, 2, size, width), options)
    if speculator.heads is not None and options.speculate:
        eager = options.updated(
            {"exit": {"threshold": _EAGER, "max_tokens": width}, "prices": "row=0"}
        )
        found |= {"heads": (None, options), "eager heads": (None, eager)}
    return found
