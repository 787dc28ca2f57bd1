"""What a drafter is: it gets the state of a sequence and gives a Draft.

Rows that were run for it wait in the hidden cache, where verification takes them on. Called by
`decode`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from selfspec.decoding.acceptance import DraftToken, Target
from selfspec.decoding.controllers import DraftController
from selfspec.decoding.sampling import Choice, Sampler
from selfspec.decoding.state import DecodeState, Pass
from selfspec.decoding.stats import EXIT, Ended, Round, StopReason, Stopwatch
from selfspec.decoding.work import Steps, ready
from selfspec.model.kv import depths


@dataclass(kw_only=True)
class Draft:
    """k proposed tokens: a chain, each behind the one before, or a tree, each behind its parent."""

    proposed: list[DraftToken] = field(default_factory=list)
    heads: int = 0
    """How often exit heads were asked: for one token at one layer, or for a level of a tree."""
    ended: Ended = "off"
    target: Target | None = None
    """What verification held of it: of the newest token's row, and of each token's."""

    @classmethod
    def of(
        cls,
        tokens: Sequence[int],
        parents: Sequence[int] | None = None,
        *,
        source: str = EXIT,
        ended: Ended = "off",
    ) -> Draft:
        """Tokens that ran through no layer; None: a chain."""
        behind = range(-1, len(tokens) - 1) if parents is None else parents
        rows = zip(tokens, behind, strict=True)
        return cls(proposed=[DraftToken(*row, source=source) for row in rows], ended=ended)

    @classmethod
    def again(cls, entry: Round) -> Draft:
        """What was proposed in a round, without what drafters knew of it."""
        parents = range(-1, len(entry.sources) - 1) if entry.parents is None else entry.parents
        rows = zip(entry.draft_tokens, parents, entry.exit_layers, entry.sources, strict=True)
        return cls(proposed=[DraftToken(*row) for row in rows], heads=entry.heads)

    def verified(
        self,
        tokens: list[int],
        kept: list[int],
        passes: Sequence[Pass],
        *,
        prefill: bool = False,
        stop_reason: StopReason | None = None,
    ) -> Round:
        """The round in which verification committed `tokens`, of which the draft's are `kept`."""
        return Round(
            tokens=tokens,
            draft_tokens=self.tokens,
            exit_layers=[one.layer for one in self.proposed],
            sources=[one.source for one in self.proposed],
            parents=None if self.is_chain else self.parents,
            kept=kept,
            ended=self.ended,
            heads=self.heads,
            passes=passes,
            prefill=prefill,
            stop_reason=stop_reason,
        )

    @property
    def tokens(self) -> list[int]:
        return [one.token for one in self.proposed]

    @property
    def parents(self) -> list[int]:
        return [one.parent for one in self.proposed]

    @property
    def trunk(self) -> int:
        """Tokens of its first path, each behind the one before."""
        turned = (at for at, one in enumerate(self.proposed) if one.parent != at - 1)
        return next(turned, len(self.proposed))

    @property
    def is_chain(self) -> bool:
        return self.trunk == len(self.proposed)

    @property
    def depth(self) -> int:
        """Tokens of its longest path."""
        return len(self.proposed) if self.is_chain else 1 + max(depths(self.parents))

    def path(self, index: int) -> list[int]:
        """The places of the tokens down to one of them, itself included; -1: none."""
        found: list[int] = []
        while index >= 0:
            found.append(index)
            index = self.proposed[index].parent
        return found[::-1]

    def tokens_to(self, index: int) -> list[int]:
        """The tokens of that path."""
        return [self.proposed[at].token for at in self.path(index)]

    def following(self, row: int) -> list[int]:
        """Tokens that follow a row of verification: 0 the newest token's, i + 1 that of token i."""
        return [at for at, one in enumerate(self.proposed) if one.parent == row - 1]


class Committed(Protocol):
    """A text that grows: what a drafter that runs no layers has to know of a DecodeState."""

    def committed(self, start: int) -> list[int]:
        """The text's ids from the `start`-th on, without padding."""


class Trunks(Protocol):
    """Proposes chains that take no work: prompt lookup, text that a grammar forces."""

    def propose(self, state: Committed, limit: int, rival: float = 0.0) -> Draft:
        """Up to `limit` tokens; none unless more than `rival` should be accepted."""

    def learn(self, draft: Draft, kept: Sequence[int]) -> None:
        """What became of the draft that was proposed last: which of its tokens stayed."""


StateT = TypeVar("StateT", bound=Committed)
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


Drafter = DraftsFrom[DecodeState]
"""What `decode` asks."""


class NoDrafter:
    """Proposes nothing: plain decoding."""

    def draft(self, state: Committed, limit: int, watch: Stopwatch) -> Steps[Draft]:  # noqa: ARG002  # the protocol's
        return ready(Draft())

    def learn(self, draft: Draft, kept: Sequence[int]) -> None: ...


class PacedDrafter:
    """Base of drafters whose controller sets how many tokens a round drafts."""

    def __init__(self, controller: DraftController, end_tokens: Collection[int] = ()) -> None:
        """`end_tokens` close a sequence: nothing is drafted behind one."""
        self.controller = controller
        self.end_tokens = frozenset(end_tokens)

    def learn(self, draft: Draft, kept: Sequence[int]) -> None:
        """Tell the controller; rounds without drafts say nothing about draft lengths."""
        if draft.proposed:
            self.controller.end(draft.depth, len(kept))


@dataclass(frozen=True)
class Drafting:
    """How a drafter that computes logits makes a chain of them."""

    sampler: Sampler
    """The target's."""
    controller: DraftController
    end_tokens: Collection[int] = ()
    beliefs: bool = False
    """Whether tokens keep the distribution of their place."""


class ChoosingDrafter(PacedDrafter):
    """Base of drafters that choose tokens from logits."""

    def __init__(self, how: Drafting) -> None:
        super().__init__(how.controller, how.end_tokens)
        self.sampler, self.beliefs = how.sampler.for_drafts(), how.beliefs


class DraftWriter:
    """Writes one Draft, until W_max, `limit`, the controller or an end token completes it."""

    def __init__(self, drafter: PacedDrafter, limit: int, *, source: str) -> None:
        width = drafter.controller.begin()
        self.room = max(min(width, limit), 0)
        """Tokens that still fit; 0 when the draft is complete."""
        self.draft = Draft(ended="width" if width <= limit else "budget")
        self._source, self._drafter = source, drafter

    def add(
        self, choice: Choice, confidence: float, *, layer: int = 0, chance: float = 0.0
    ) -> None:
        """Propose a token that left at `layer`; `chance` of the whole path to stay."""
        proposed = self.draft.proposed
        token, probs, belief = choice
        proposed.append(
            DraftToken(token, len(proposed) - 1, layer, self._source, chance, probs, belief)
        )
        self.room -= 1
        if token in self._drafter.end_tokens:
            self.stop("eos")
        elif self.room and not self._drafter.controller.go_on(confidence):
            self.stop("unsure")

    def stop(self, reason: Ended) -> None:
        self.draft.ended = reason
        self.room = 0
