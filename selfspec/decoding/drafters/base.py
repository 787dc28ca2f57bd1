"""What a drafter is: it gets the state of a sequence and gives a Draft.

Rows that were run for it wait in the hidden cache, where verification takes them on. Called by
`decode`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from torch import Tensor

from selfspec.decoding.acceptance import Proposed
from selfspec.decoding.controllers import DraftController
from selfspec.decoding.sampling import Choice
from selfspec.decoding.state import DecodeState
from selfspec.decoding.stats import EXIT, Ended, Round, Stopwatch
from selfspec.decoding.work import Steps, ready
from selfspec.model.kv import depths


@dataclass(kw_only=True)
class Draft:
    """k proposed tokens."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] | None = None
    """None: each token follows the one before. Else, for each, the earlier one that it follows;
    -1: the newest committed token."""
    chances: list[float] = field(default_factory=list)
    """Of each to stay, as its drafter has it, with all before it; where it says."""
    probs: list[Tensor | None] | None = None
    """The law each token was drawn from, [V] each, after the processors; None: it is certain."""
    beliefs: list[Tensor] | None = None
    """What the drafter thought of each place, [V], after the processors: where the acceptance rule
    reads it, also for tokens that were not drawn. None: not kept, or there is none."""
    exit_layers: list[int] = field(default_factory=list)
    """Where each left; 0 for tokens that ran through no layer."""
    sources: list[str] = field(default_factory=list)
    """Who proposed each, as `sources` names them."""
    heads: int = 0
    """How often exit heads were asked: for one token at one layer, or for a level of a tree."""
    ended: Ended = "off"

    def __post_init__(self) -> None:
        """What is not said: tokens are of exit heads that read embeddings."""
        self.exit_layers = self.exit_layers or [0] * len(self.tokens)
        self.sources = self.sources or [EXIT] * len(self.tokens)

    @classmethod
    def of(cls, entry: Round) -> Draft:
        """What was proposed in a round."""
        return cls(
            tokens=entry.draft_tokens,
            parents=entry.parents,
            exit_layers=entry.exit_layers,
            sources=entry.sources,
            heads=entry.heads,
        )

    @property
    def depth(self) -> int:
        """Tokens of its longest path."""
        if self.parents is None:
            return len(self.tokens)
        return 1 + max(depths(self.parents), default=-1)

    @property
    def trunk(self) -> int:
        """Tokens of its first path, each behind the one before."""
        if self.parents is None:
            return len(self.tokens)
        turned = (at for at, parent in enumerate(self.parents) if parent != at - 1)
        return next(turned, len(self.parents))

    def path(self, index: int) -> list[int]:
        """The tokens down to one of them, itself included; -1: none."""
        if self.parents is None:
            return [*range(index + 1)]
        found: list[int] = []
        while index >= 0:
            found.append(index)
            index = self.parents[index]
        return found[::-1]

    def following(self, row: int) -> list[int]:
        """Tokens that follow a row of verification: 0 the newest token's, i + 1 that of token i."""
        if self.parents is None:
            return [row] if row < len(self.tokens) else []
        return [index for index, parent in enumerate(self.parents) if parent == row - 1]

    def proposed(self, index: int) -> Proposed:
        """One of the tokens, with what is known of it."""
        return Proposed(
            self.tokens[index],
            None if self.probs is None else self.probs[index],
            None if self.beliefs is None else self.beliefs[index],
        )

    def parents_behind(self, waiting: int) -> list[int]:
        """Parents of the rows of a verification: `waiting` committed tokens, then a tree's."""
        behind = [waiting + parent for parent in self.parents or ()]
        return [*range(-1, waiting - 1), *behind]


class Committed(Protocol):
    """A text that grows: what a drafter that runs no layers has to know of a DecodeState."""

    def committed(self, start: int) -> list[int]:
        """Its ids from the `start`-th on, without padding."""


class Trunks(Protocol):
    """Proposes chains that take no work: text already seen, text that a grammar forces."""

    def propose(self, state: Committed, limit: int, rival: float = 0.0) -> Draft:
        """Up to `limit` tokens; none unless more than `rival` should be accepted."""

    def learn(self, draft: Draft, kept: Sequence[int]) -> None:
        """What became of the draft that was proposed last: which of its tokens stayed."""


State_contra = TypeVar("State_contra", bound=Committed, contravariant=True)


class DraftsFrom(Protocol[State_contra]):
    """Proposes at most `limit` tokens to follow the committed ones of some kind of state."""

    def draft(self, state: State_contra, limit: int, watch: Stopwatch) -> Steps[Draft]:
        """A draft of 0..limit tokens, and the work that leads there.

        Rows may be left waiting in a DecodeState's `hidden`: first that of the newest committed
        token, then those of the drafts, in order, none twice.
        """

    def learn(self, draft: Draft, kept: Sequence[int]) -> None:
        """What became of the draft that was asked for last: which of its tokens stayed."""


class Drafter(DraftsFrom[DecodeState], Protocol):
    """What `decode` asks."""


class NoDrafter:
    """Proposes nothing: plain decoding."""

    def draft(self, state: Committed, limit: int, watch: Stopwatch) -> Steps[Draft]:  # noqa: ARG002  # the protocol's
        """An empty draft."""
        return ready(Draft())

    def learn(self, draft: Draft, kept: Sequence[int]) -> None:
        """There is nothing to learn."""


class PacedDrafter:
    """Base of drafters whose controller sets how many tokens a round drafts."""

    def __init__(
        self,
        controller: DraftController,
        end_tokens: Collection[int] = (),
        *,
        beliefs: bool = False,
    ) -> None:
        """`end_tokens` close a sequence: nothing is drafted behind one. `beliefs` are kept."""
        self.controller = controller
        self.beliefs = beliefs
        self.end_tokens = frozenset(end_tokens)

    def learn(self, draft: Draft, kept: Sequence[int]) -> None:
        """Tell the controller; rounds without drafts say nothing about draft lengths."""
        if draft.tokens:
            self.controller.end(draft.depth, len(kept))


class DraftWriter:
    """Writes one Draft, until W_max, `limit`, the controller or an end token completes it."""

    def __init__(
        self, drafter: PacedDrafter, limit: int, *, source: str, sampled: bool = False
    ) -> None:
        """`sampled`: tokens are drawn from laws, which acceptance will want."""
        width = drafter.controller.begin()
        self.room = max(min(width, limit), 0)
        """Tokens that still fit; 0 when the draft is complete."""
        self.draft = Draft(
            probs=[] if sampled else None,
            beliefs=[] if drafter.beliefs else None,
            ended="width" if width <= limit else "budget",
        )
        self._source = source
        self._drafter = drafter

    def add(self, choice: Choice, confidence: float, *, layer: int = 0) -> None:
        """Propose a token that left at `layer`."""
        self.draft.tokens.append(choice.token)
        self.draft.exit_layers.append(layer)
        self.draft.sources.append(self._source)
        if self.draft.probs is not None and choice.law is not None:
            self.draft.probs.append(choice.law)
        if self.draft.beliefs is not None and choice.belief is not None:
            self.draft.beliefs.append(choice.belief)
        self.room -= 1
        if choice.token in self._drafter.end_tokens:
            self.stop("eos")
        elif self.room and not self._drafter.controller.go_on(confidence):
            self.stop("unsure")

    def stop(self, reason: Ended) -> None:
        """The draft is complete."""
        self.draft.ended = reason
        self.room = 0
