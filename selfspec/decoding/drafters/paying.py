"""The never-slower rule: drafts that cost time are made while they have been paying.

Whether to draft is decided from past rounds alone, never from the token that is drawn next, so
sampling stays exact. Called by `choice`; replay follows it with the same classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic

from selfspec.decoding.drafters.base import Draft, DraftsFrom
from selfspec.decoding.drafters.ngram import StateT
from selfspec.decoding.prices import DraftCost
from selfspec.decoding.sources import FREE
from selfspec.decoding.stats import Stopwatch
from selfspec.decoding.work import Steps, ready

NEWEST = 1 / 16
"""Weight of the newest round in the running mean. With 1 / 8 drafts that pay paused by chance: in
replay, default heads behind text already seen lost 0.8 % on 48 Spec-Bench questions, with this
weight nothing."""

PRIOR = 0.5
"""Steps a round is believed to gain before the first one has; over NEWEST the most it may lose."""

SHORTEST_PAUSE, LONGEST_PAUSE = 8, 64
"""Rounds."""

DEAR = 0.4
"""Steps that a draft token may take beside its layers and still be tried at once. From blocks of a
quantised file a row and a head take 0.5, and tries alone cost 10 % of an answer of 64 tokens; the
default heads' drafts are right 0.46 of the time."""


class Paying:
    """Says whether to draft: while a running mean of what rounds gain, in plain steps, is >= 0.

    A round gains the tokens accepted less what drafting cost. Where the mean is below 0, a round
    that loses is followed by a pause of 8 rounds, then 16, up to 64, until the mean is back.

    Drafts that are dear begin with a long pause, and without credit.

    However wrong the drafts are, after P pauses at most 8 + c P plain steps are lost, c being what
    the dearest round cost: the mean starts at 1/2, moves by 1/16, and a round that brings it back
    has gained what is lost when it falls again. Where no draft is ever right, the first pause comes
    after ln(1 + 1 / 2c) / ln(16 / 15) rounds, rounded up (31 at c = 0.08, 7 at c = 1), and in the
    end one round of 65 drafts.
    """

    def __init__(self, cost: DraftCost) -> None:
        """Of one sequence; a session's next turn starts anew."""
        self._cost = cost
        self._begun = False
        self._gain = PRIOR
        self._next_pause = SHORTEST_PAUSE
        self._pausing = 0
        """Rounds to go; those in which nobody asks do not count."""

    def pauses(self) -> bool:
        """Whether this round goes without; asked once in each."""
        if not self._begun and self._cost.per_token >= DEAR:  # known once a round begins
            self._gain, self._next_pause, self._pausing = 0.0, LONGEST_PAUSE, LONGEST_PAUSE // 2
        self._begun = True
        pauses = self._pausing > 0
        self._pausing -= pauses
        return pauses

    def learn(self, draft: Draft, kept: Sequence[int]) -> None:
        """Weigh a round that did not pause. Drafts without work would be there anyway."""
        accepted = sum(draft.sources[index] not in FREE for index in kept)
        gain = accepted - self._cost.of(draft)
        self._gain += NEWEST * (gain - self._gain)
        if self._gain >= 0.0:
            self._next_pause = SHORTEST_PAUSE
        elif gain < 0.0:
            self._pausing = self._next_pause
            self._next_pause = min(2 * self._next_pause, LONGEST_PAUSE)


class WhilePaying(Generic[StateT]):
    """Asks another drafter while that has been `Paying`."""

    def __init__(self, drafter: DraftsFrom[StateT], cost: DraftCost) -> None:
        """Of one sequence."""
        self._drafter = drafter
        self._rule = Paying(cost)
        self._drafted = False

    def draft(self, state: StateT, limit: int, watch: Stopwatch) -> Steps[Draft]:
        """The other drafter's, or an empty one that ended "off"."""
        self._drafted = not self._rule.pauses()
        return self._drafter.draft(state, limit, watch) if self._drafted else ready(Draft())

    def learn(self, draft: Draft, kept: Sequence[int]) -> None:
        """Weigh the round, and tell the drafter; it does not hear of rounds without it."""
        if self._drafted:
            self._rule.learn(draft, kept)
            self._drafter.learn(draft, kept)
