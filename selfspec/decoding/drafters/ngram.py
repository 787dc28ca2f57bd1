"""Drafts without a model: prompt lookup, forced tokens of a grammar, successors, lookahead.

Prompt lookup (Saxena 2023; Hugging Face's `prompt_lookup_num_tokens`) copies what followed the same
n-gram earlier in the prompt or answer. Successors are the tokens that verification found likely
after the same tokens, in any text.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate
from operator import mul
from random import Random

from torch import Tensor

from selfspec.decoding.acceptance import AcceptanceRule, Draft, ObservedRule
from selfspec.decoding.costs import DraftCost, costs_by_row
from selfspec.decoding.drafters.base import (
    ROOT,
    DraftController,
    DraftWriter,
    Likeliest,
    PacedDrafter,
    Trunks,
)
from selfspec.decoding.sampling import DraftToken, GrammarMask
from selfspec.decoding.state import DecodeState, Drafter, Steps, no_work
from selfspec.decoding.stats import GRAMMAR, LOOKAHEAD, NGRAM, SUCCESSORS, Stopwatch

NEWEST = 1 / 8  # weight of the newest observation in a running mean; the newest six have half of it


class NgramIndex:
    """A growing text, and the place where each of its n-grams last continued.

    A lookup takes the longest known n-gram at the end of the text, and its most recent occurrence:
    recent text repeats more often than older text.
    """

    def __init__(self, size: int) -> None:
        self.text, self._size = list[int](), size
        self._continuations: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens. Each adds at most `size` entries, regardless of the text's length."""
        for token in tokens:
            place = len(self.text)
            for count in range(1, min(self._size, place) + 1):
                # the n-gram at the very end has no continuation yet, so it never finds itself
                self._continuations[tuple(self.text[place - count :])] = place
            self.text.append(token)

    def find(self) -> tuple[int, int]:
        """The length of the match at the end of the text (0: none), and where it continued."""
        for count in range(min(self._size, len(self.text)), 0, -1):
            place = self._continuations.get(tuple(self.text[-count:]))
            if place is not None:
                return count, place
        return 0, len(self.text)

    def copy(self, place: int, count: int) -> list[int]:
        """`count` tokens from `place` on; past the end of the text, the copy repeats itself."""
        tokens = self.text[place : place + count]
        while len(tokens) < count:
            tokens.append(tokens[len(tokens) - (len(self.text) - place)])
        return tokens


class NgramDrafter(PacedDrafter):
    """Drafts the continuation of the longest match, as far as it is expected to pay.

    For each match length it keeps a running mean of how often the next token was right, whether or
    not the guess was proposed. Each right token makes the match longer by one, so the product of
    the means is the chance that a draft token is reached and right. The draft length maximises the
    expected tokens per time, given the cost of rows in verification.
    """

    def __init__(
        self,
        controller: DraftController,
        end_tokens: Collection[int] = (),
        *,
        size: int,
        cost: DraftCost,
    ) -> None:
        """`size`: longest n-gram. One drafter serves one sequence, its prompt included."""
        super().__init__(controller, end_tokens)
        self._index, self._size, self._cost = NgramIndex(size), size, cost
        # initially a longer match is trusted more
        self._rates = [count / (size + 1) for count in range(size + 1)]
        self._guess: list[int] = []
        self._match_lengths: list[int] = []

    def draft(self, state: DecodeState, limit: int, watch: Stopwatch) -> Steps[Draft]:  # noqa: ARG002  # the protocol's
        return no_work(self.propose(state, limit))

    def propose(self, state: DecodeState, limit: int, rival: float = 0.0) -> Draft:
        """Up to min(limit, W_max) tokens; none unless more than `rival` are expected to stay."""
        self._read(state)
        writer = DraftWriter(self, limit, source=NGRAM)
        count, place = self._index.find()
        self._guess = self._index.copy(place, writer.room) if count else []
        self._match_lengths = [min(count + step, self._size) for step in range(len(self._guess))]
        rates = [self._rates[matched] for matched in self._match_lengths]
        chances = list(accumulate(rates, mul))
        length = self._best_length(chances)
        if sum(chances[:length]) > rival:
            for token, rate, chance in zip(self._guess[:length], rates, chances, strict=False):
                writer.add(DraftToken(token, chance=chance), rate)
                if not writer.room:
                    break
        if writer.room:
            writer.stop("unsure" if self._guess else "off")
        return writer.draft

    def _best_length(self, chances: Sequence[float]) -> int:
        steps = accumulate(costs_by_row(self._cost.row_costs), initial=1.0)
        tokens = accumulate(chances, initial=1.0)
        rates = [token / step for token, step in zip(tokens, steps, strict=False)]
        return max(range(len(rates)), key=rates.__getitem__)

    def _read(self, state: DecodeState) -> None:
        """Read the tokens committed since the last draft, and score the last guess by them."""
        tokens = state.committed(len(self._index.text))
        for matched, guessed, token in zip(self._match_lengths, self._guess, tokens, strict=False):
            self._rates[matched] += NEWEST * ((guessed == token) - self._rates[matched])
            if guessed != token:
                break
        self._index.extend(tokens)


class SeenTextFirst:
    """Proposes a trunk that promises more tokens than another drafter gives, else asks that one.

    The other drafter's yield is a running mean of its accepted tokens per round in which it drafts,
    and 0 as long as it declines to draft.
    """

    def __init__(self, trunks: Trunks, other: Drafter) -> None:
        self._trunks, self._other = trunks, other
        self._other_yield, self._other_drafted, self._other_declines = 0.0, False, False

    def draft(self, state: DecodeState, limit: int, watch: Stopwatch) -> Steps[Draft]:
        rival = 0.0 if self._other_declines else self._other_yield
        draft = self._trunks.propose(state, limit, rival)
        self._other_drafted = False
        if not draft.proposed:
            draft = yield from self._other.draft(state, limit, watch)
            self._other_declines = draft.ended == "off" and not draft.proposed
            self._other_drafted = not self._other_declines
        return draft

    def learn(self, draft: Draft, kept: Sequence[int]) -> None:
        if self._other_drafted:
            self._other_yield += NEWEST * (len(kept) - self._other_yield)
            self._other.learn(draft, kept)
        else:
            self._trunks.learn(draft, kept)


# --- tokens that a grammar forces: keys, quotes, brackets, the end


class GrammarDrafter:
    """Trunks for one text under a grammar."""

    def __init__(self, mask: GrammarMask, pad: int, most: int, seen: Trunks | None = None) -> None:
        """`pad`: padding ids before the text; `most`: maximum draft tokens of a round."""
        self._mask, self._start, self._most = mask, mask.start - pad, most
        self._seen, self._was_forced = seen, False

    def propose(self, state: DecodeState, limit: int, rival: float = 0.0) -> Draft:
        """The forced tokens, regardless of `rival`; else prompt lookup."""
        text = state.committed(self._start)
        forced = self._mask.forced_tokens(text, max(min(limit, self._most), 0))
        self._was_forced = bool(forced)
        if forced:
            rows = [DraftToken(t, at - 1, 0, GRAMMAR, 1.0) for at, t in enumerate(forced)]
            return Draft(proposed=rows, ended="width")
        if self._seen is None:
            return Draft()
        draft = self._seen.propose(state, limit, rival)
        count = self._mask.count_allowed(text, draft.tokens)
        if count < len(draft.proposed):
            return Draft(proposed=draft.proposed[:count], ended="unsure")
        return draft

    def learn(self, draft: Draft, kept: Sequence[int]) -> None:
        if self._seen is not None and not self._was_forced:
            self._seen.learn(draft, kept)


# --- successors: Token Recycling

KEPT = 8  # successors in an entry
_MOST = 1 << 16  # maximum entries of each table; the oldest is dropped

_PRIOR = (
    (0.5, 0.09, 0.05, 0.03, 0.02, 0.015, 0.01, 0.01),
    (0.25, 0.08, 0.06, 0.04, 0.03, 0.02, 0.02, 0.02),
)
"""How often each rank was right, approximately: after two known tokens, and after one
(SmolLM2-135M, 48 Spec-Bench questions)."""

_CREDIT = 100.0  # weight of these priors, in observations


class Successors:
    """Tables of the likeliest successors of the last two tokens, and of the last one.

    Follows Token Recycling (Luo et al. 2024), whose table is keyed by the last token alone; here
    the last two are tried first. All texts of a model share the tables, so drafts depend on earlier
    texts; the output does not.
    """

    def __init__(self) -> None:
        self._tables: tuple[dict[object, Sequence[int]], ...] = ({}, {})
        self._hits = [[_CREDIT * rate for rate in rates] for rates in _PRIOR]
        self._lookups = [_CREDIT for _ in _PRIOR]

    def guesses(self, tokens: Sequence[int]) -> Likeliest:
        """Guesses after a text that ends with `tokens`, with the chances of their ranks so far."""
        if (entry := self._entry(tokens)) is None:
            return Likeliest([], [])
        order, successors = entry
        rates = (right / self._lookups[order] for right in self._hits[order])
        return Likeliest(successors, [*accumulate(rates, min)][: len(successors)])

    def learn(self, tokens: Sequence[int], likely: Sequence[int], token: int) -> None:
        """Note the target's likeliest tokens, and its choice, after a text ending with `tokens`."""
        if entry := self._entry(tokens):
            order, successors = entry
            self._lookups[order] += 1.0
            if token in successors:
                self._hits[order][successors.index(token)] += 1.0
        for table, key in zip(self._tables, _keys(tokens), strict=True):
            table.pop(key, None)  # re-inserted as the newest
            table[key] = likely
            if len(table) > _MOST:
                del table[next(iter(table))]

    def _entry(self, tokens: Sequence[int]) -> tuple[int, Sequence[int]] | None:
        for order, key in enumerate(_keys(tokens)):
            if (successors := self._tables[order].get(key)) is not None:
                return order, successors
        return None


def _keys(tokens: Sequence[int]) -> tuple[object, object]:
    return tuple(tokens[-2:]), tokens[-1]


class TeachingRule(ObservedRule):
    """Teaches a table every decision of a rule."""

    def __init__(self, rule: AcceptanceRule, table: Successors, newest: Sequence[int]) -> None:
        super().__init__(rule)
        self._table, self._newest = table, list(newest)

    def note(self, logits: Tensor, token: int) -> None:
        likely = logits.topk(min(KEPT, len(logits))).indices.tolist()
        self._table.learn(self._newest, likely, token)
        self._newest = [self._newest[-1], token]


class SuccessorGuesser:
    """Guesses from the table, without computation."""

    source = SUCCESSORS
    asks_once = False

    def __init__(self, table: Successors, count: int) -> None:
        self._table, self._count = table, count

    def begin(self, state: DecodeState) -> None:
        self._newest = state.committed(-2)

    def ask(self, draft: Draft, nodes: Sequence[int], _watch: Stopwatch) -> Steps[list[Likeliest]]:
        guesses = (self._table.guesses([*self._newest, *draft.tokens_to(at)]) for at in nodes)
        return no_work([guess.best(self._count) for guess in guesses])


# --- lookahead: n-grams generated beside earlier verifications


class NgramPool:
    """The newest few n-grams for each first token."""

    def __init__(self, level: int, most: int) -> None:
        self.text: list[int] = []  # tokens read so far; their n-grams are in the pool
        self._level, self._most = level, most
        self._ngrams: dict[int, dict[tuple[int, ...], None]] = {}

    def read(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.text.append(token)
            if len(self.text) >= self._level:
                self.add(self.text[-self._level :])

    def add(self, ngram: Sequence[int]) -> None:
        ngrams, rest = self._ngrams.setdefault(ngram[0], {}), tuple(ngram[1:])
        ngrams.pop(rest, None)
        ngrams[rest] = None
        if len(ngrams) > self._most:
            del ngrams[next(iter(ngrams))]

    def ngrams(self, token: int) -> list[tuple[int, ...]]:
        return list(self._ngrams.get(token, ()))[::-1]


class LookaheadDrafter(PacedDrafter):
    """Runs a window of guessed tokens beside each verification, and drafts n-grams from it.

    Lookahead decoding (Fu et al. 2024; names as in hao-ai-lab/LookaheadDecoding). Level 0 of the
    window is a chain that begins with the newest token in column 0; level j of column i follows
    level j - 1 of that column, at position i + j, as in the paper's mask. Here the window is part
    of the draft: equal tokens after one parent share a row, and its right tokens are accepted.

    As published with POOL_FROM_PROMPT=1 and ALWAYS_FWD_ONE=1, with three differences: the pool is
    used before the window is full; the window keeps its width, where the original begins wider and
    narrows; and it pauses when the text has no room for its paths.
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
        """`level`: N, the tokens of an n-gram, first included; at most `guesses` are drafted.

        `window`: W columns; 0 drafts from the text alone. `most`: maximum draft tokens of a round;
        the window is narrowed until a whole n-gram fits beside it. The `controller` sets how many
        tokens of an n-gram are drafted.
        """
        super().__init__(controller, end_tokens)
        self._level, self._most = level, most
        self._columns = max(min(window, (most + 1) // (level - 1) - 1), 0)
        self._pool = NgramPool(level, guesses)
        self._levels: list[list[int]] = []  # by level and column; [0][0] is the text's newest token
        self._ends: list[int] = []  # draft tokens of the last level, by column; empty: no window
        self._guess_length = 0  # tokens of the longest n-gram in this round
        self._random = Random(0)

    def draft(self, state: DecodeState, limit: int, watch: Stopwatch) -> Steps[Draft]:  # noqa: ARG002  # the protocol's
        self._pool.read(state.committed(len(self._pool.text)))
        if self._columns and not self._levels:
            self._levels = [self._draw(self._columns)]
        self._draft, self._places, self._ends = Draft(), dict[tuple[int, int], int](), []
        levels = len(self._levels)
        fits = levels > 0 and levels + self._columns - 2 <= limit
        self._add_guesses(limit, self._most - (levels * self._columns - 1 if fits else 0))
        if fits:
            self._add_window()
        if self._draft.proposed:
            self._draft.ended = "width"
        return no_work(self._draft)

    def learn(self, draft: Draft, kept: Sequence[int]) -> None:
        if self._ends and draft.target is not None:
            self._move([draft.target.best[end + 1] for end in self._ends])
        if self._guess_length:
            self.controller.end(self._guess_length, min(len(kept), self._guess_length))

    def _add(self, parent: int, token: int) -> int:
        """The index of `token` after `parent`, added if new; `parent` if that is an end token."""
        proposed = self._draft.proposed
        if parent != ROOT and proposed[parent].token in self.end_tokens:
            return parent
        place = self._places.setdefault((parent, token), len(proposed))
        if place == len(proposed):
            proposed.append(DraftToken(token, parent, source=LOOKAHEAD))
        return place

    def _add_guesses(self, limit: int, room: int) -> None:
        width, self._guess_length = min(self.controller.begin(), limit), 0
        for ngram in self._pool.ngrams(self._pool.text[-1]):
            at = ROOT
            for count, token in enumerate(ngram[:width], start=1):
                if len(self._draft.proposed) >= room:
                    return
                at, self._guess_length = self._add(at, token), max(self._guess_length, count)

    def _add_window(self) -> None:
        self._levels[0][0] = self._pool.text[-1]
        first = ROOT
        for column, tokens in enumerate(zip(*self._levels, strict=True)):
            end = first = self._add(first, tokens[0]) if column else ROOT
            for token in tokens[1:]:
                end = self._add(end, token)
            self._ends.append(end)

    def _move(self, new_level: list[int]) -> None:
        """Add the target's tokens after each column as a new level, and move on by one position.

        While the window has too few levels its columns shift, and a random one is added.
        """
        self._levels.append(new_level)
        if len(self._levels) == self._level:
            for ngram in zip(*self._levels, strict=True):
                self._pool.add(ngram)
            del self._levels[0]
        else:
            self._levels = [tokens[1:] + self._draw(1) for tokens in self._levels]

    def _draw(self, count: int) -> list[int]:
        return self._random.choices(self._pool.text, k=count)
