"""What a drafter is: it gets the state of a sequence and gives a Draft.

Rows that were run for it wait in the hidden cache, where verification takes them on. Called by
`decode`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from selfspec.state import DecodeState
from selfspec.stats import Ended, Stopwatch


@dataclass(kw_only=True)
class Draft:
    """k proposed tokens."""

    tokens: list[int] = field(default_factory=list)
    probs: list[Tensor] | None = None
    """The law each token was drawn from, [V] each, after the processors; None: they are certain."""
    exit_layers: list[int] = field(default_factory=list)
    """Where each left; 0 for tokens that ran through no layer."""
    ended: Ended = "off"


class Drafter(Protocol):
    """Proposes at most `limit` tokens to follow the committed ones."""

    def draft(self, state: DecodeState, limit: int, watch: Stopwatch) -> Draft:
        """A draft of 0..limit tokens.

        Rows may be left waiting in `state.hidden`: first that of the newest committed token, then
        those of the drafts, in order, none twice.
        """


class NoDrafter:
    """Proposes nothing: plain decoding."""

    def draft(self, state: DecodeState, limit: int, watch: Stopwatch) -> Draft:  # noqa: ARG002  # the protocol's
        """An empty draft."""
        return Draft()
