"""Drafts from the model's own lookahead: n-grams that came out beside earlier verifications.

Lookahead decoding (Fu et al. 2024, "Break the Sequential Dependency of LLM Inference Using
Lookahead Decoding"; names as in hao-ai-lab/LookaheadDecoding), for any model, without heads. A
window of guessed tokens runs beside each verification. What the model says behind them (Jacobi
iteration) makes n-grams for a pool; those that begin with the newest token are drafted.

Rows of the window stand where the paper's mask has them: level 0 is a chain behind the newest
token, which is its first column; level j of column i follows level j - 1 of that column, at
position i + j. As parents that is a tree, so here the window is a part of the draft: equal rows
behind one parent are one row, and a token of the window that is right stays. In the project rows
may be equal, and only n-grams from the pool stay. Called by `choice`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from random import Random

from selfspec.decoding.acceptance import Draft, DraftToken
from selfspec.decoding.drafters.base import ROOT, Committed, DraftController, PacedDrafter
from selfspec.decoding.state import Steps, ready
from selfspec.decoding.stats import LOOKAHEAD, Stopwatch


class NgramPool:
    """n-grams by their first token, of each the newest few."""

    def __init__(self, level: int, most: int) -> None:
        """`level`: tokens of an n-gram; `most`: kept with the same first token."""
        self.text: list[int] = []
        """What was read; its n-grams are in."""
        self._level, self._most = level, most
        self._behind: dict[int, dict[tuple[int, ...], None]] = {}

    def read(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.text.append(token)
            if len(self.text) >= self._level:
                self.add(self.text[-self._level :])

    def add(self, ngram: Sequence[int]) -> None:
        behind, rest = self._behind.setdefault(ngram[0], {}), tuple(ngram[1:])
        behind.pop(rest, None)
        behind[rest] = None
        if len(behind) > self._most:
            del behind[next(iter(behind))]

    def following(self, token: int) -> list[tuple[int, ...]]:
        return list(self._behind.get(token, ()))[::-1]


class Branches:
    """Draft tokens while they are put together; nothing goes behind one of `ends`."""

    def __init__(self, ends: Collection[int]) -> None:
        self.proposed: list[DraftToken] = []
        self._ends = ends
        self._places: dict[tuple[int, int], int] = {}

    def add(self, parent: int, token: int) -> int:
        """Where this token behind this parent is, new or not; the parent if that is an end."""
        if parent != ROOT and self.proposed[parent].token in self._ends:
            return parent
        place = self._places.setdefault((parent, token), len(self.proposed))
        if place == len(self.proposed):
            self.proposed.append(DraftToken(token, parent, source=LOOKAHEAD))
        return place


class LookaheadDrafter(PacedDrafter):
    """Of one text: its window, and its pool, which begins with the n-grams of the prompt.

    As published with POOL_FROM_PROMPT=1 and ALWAYS_FWD_ONE=1, except that the pool is asked before
    the window is full, too; that a window which fills up stays as wide as it is, where the
    project's begins wider and narrows; and that it rests where the text has no room for its paths.
    """

    def __init__(
        self,
        controller: DraftController,
        end_tokens: Collection[int] = (),
        *,
        level: int,
        window: int,
        guesses: int,
        most: int,
    ) -> None:
        """`level`: N, tokens of an n-gram, the newest included; at most `guesses` are drafted.

        `window`: W columns; 0 drafts from the text alone. `most`: draft tokens of a round. The
        window loses columns until a whole n-gram fits beside it. The `controller` sets how much of
        an n-gram is drafted.
        """
        super().__init__(controller, end_tokens)
        self._level, self._most = level, most
        self._columns = max(min(window, (most + 1) // (level - 1) - 1), 0)
        self._pool = NgramPool(level, guesses)
        self._levels: list[list[int]] = []
        """Tokens by level and column; the first one is the newest of the text."""
        self._ends: list[int] = []
        """Draft tokens of the last level in this round, by column; empty if none run."""
        self._guessed = 0
        """Tokens of the longest n-gram in this round."""
        self._random = Random(0)

    def draft(self, state: Committed, limit: int, watch: Stopwatch) -> Steps[Draft]:  # noqa: ARG002  # the protocol's
        self._pool.read(state.committed(len(self._pool.text)))
        if self._columns and not self._levels:
            self._levels = [self._drawn(self._columns)]
        levels, found = len(self._levels), Branches(self.end_tokens)
        fits = levels > 0 and levels + self._columns - 2 <= limit
        self._add_guesses(found, limit, self._most - (levels * self._columns - 1 if fits else 0))
        self._ends = []
        if fits:
            self._add_window(found)
        return ready(Draft(proposed=found.proposed, ended="width" if found.proposed else "off"))

    def learn(self, draft: Draft, kept: Sequence[int]) -> None:
        if self._ends and draft.target is not None:
            self._move([draft.target.best[end + 1] for end in self._ends])
        if self._guessed:
            self.controller.end(self._guessed, min(len(kept), self._guessed))

    def _add_guesses(self, found: Branches, limit: int, room: int) -> None:
        width, self._guessed = min(self.controller.begin(), limit), 0
        for ngram in self._pool.following(self._pool.text[-1]):
            at = ROOT
            for count, token in enumerate(ngram[:width], start=1):
                if len(found.proposed) >= room:
                    return
                at, self._guessed = found.add(at, token), max(self._guessed, count)

    def _add_window(self, found: Branches) -> None:
        self._levels[0][0] = self._pool.text[-1]
        first = ROOT
        for column, tokens in enumerate(zip(*self._levels, strict=True)):
            first = found.add(first, tokens[0]) if column else ROOT
            end = first
            for token in tokens[1:]:
                end = found.add(end, token)
            self._ends.append(end)

    def _move(self, said: list[int]) -> None:
        """One level up, by what the target said behind each column, and so one position on.

        While levels are missing the columns move instead, and one that is drawn comes in.
        """
        self._levels.append(said)
        if len(self._levels) == self._level:
            for ngram in zip(*self._levels, strict=True):
                self._pool.add(ngram)
            del self._levels[0]
        else:
            self._levels = [tokens[1:] + self._drawn(1) for tokens in self._levels]

    def _drawn(self, count: int) -> list[int]:
        return self._random.choices(self._pool.text, k=count)
