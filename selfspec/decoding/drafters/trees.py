"""Trees of drafts that grow as far as they pay, and the rule that pauses drafting.

A tree grows level by level, the likeliest paths first, as long as a further row raises the expected
tokens per time. The costs of a row and a head are known (`costs`), so expensive rows make the tree
a chain, or empty. As in EAGLE-2 (Li et al. 2024) a path's value is the product of its tokens'
probabilities; as in Sequoia (Chen et al. 2024) the hardware sets the size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from itertools import islice
from typing import NamedTuple

from selfspec.decoding.acceptance import Draft
from selfspec.decoding.costs import DraftCost, costs_by_row
from selfspec.decoding.drafters.base import (
    ROOT,
    DraftController,
    Guesser,
    Likeliest,
    PacedDrafter,
    Trunks,
)
from selfspec.decoding.sampling import DraftToken
from selfspec.decoding.state import DecodeState, Drafter, Steps, no_work
from selfspec.decoding.stats import FREE, Stopwatch

# --- the never-slower rule: uses past rounds only, so sampling stays exact

NEWEST = 1 / 16
"""Weight of the newest round in the running mean. With 1 / 8, drafts that pay paused by chance:
default heads after prompt lookup lost 0.8 % on 48 Spec-Bench questions, with this weight
nothing."""

PRIOR = 0.5
"""The initial mean gain of a round, in steps. PRIOR / NEWEST bounds the loss, see `Paying`."""

SHORTEST_PAUSE, LONGEST_PAUSE = 8, 64  # rounds

EXPENSIVE = 0.5
"""Cost of a draft token, without its layers, from which drafting begins with a pause. At 0.36 (AMX,
a row and a head; eval/results/bench-bf16-amx-4096) the default heads, tried at once, gave 1.14 of
plain decoding, prompt lookup alone 1.12."""


class Paying:
    """Decides whether to draft, by the running mean of rounds' gains in plain steps.

    A round's gain is its accepted tokens minus the cost of drafting. While the mean is below 0,
    each losing round is followed by a pause of 8 rounds, then 16, up to 64.

    Drafts that cost EXPENSIVE or more begin with a long pause, and with a mean of 0.

    However wrong the drafts are, after P pauses at most 8 + c P plain steps are lost, where c is
    the drafting cost of the most expensive round: the mean starts at 1/2, moves by 1/16, and a
    round that raises it to 0 again has gained what is lost when it falls. If no draft is ever
    right, the first pause comes after ln(1 + 1 / 2c) / ln(16 / 15) rounds, rounded up (31 at
    c = 0.08, 7 at c = 1), and finally one round in 65 drafts.
    """

    def __init__(self, cost: DraftCost) -> None:
        self._cost, self._begun = cost, False
        self._gain, self._next_pause = PRIOR, SHORTEST_PAUSE
        self._pause_left = 0  # rounds left; rounds that do not call `pauses` do not count

    def pauses(self) -> bool:
        """Whether this round does not draft; called once per round."""
        if not self._begun and self._cost.per_token >= EXPENSIVE:  # the load is known from now on
            self._gain, self._next_pause, self._pause_left = 0.0, LONGEST_PAUSE, LONGEST_PAUSE // 2
        self._begun = True
        pauses = self._pause_left > 0
        self._pause_left -= pauses
        return pauses

    def learn(self, draft: Draft, kept: Sequence[int]) -> None:
        """Add a round that did not pause to the mean, without the drafts of `FREE` sources."""
        accepted = sum(draft.proposed[index].source not in FREE for index in kept)
        gain = accepted - self._cost.of(draft)
        self._gain += NEWEST * (gain - self._gain)
        if self._gain >= 0.0:
            self._next_pause = SHORTEST_PAUSE
        elif gain < 0.0:
            self._pause_left = self._next_pause
            self._next_pause = min(2 * self._next_pause, LONGEST_PAUSE)


HOPELESS_COST = 0.75
"""Cost of a first draft token, in tokens, from which nothing is drafted: in a large batch a further
row costs nearly a step. At 0.79 and 0.88 the default gave 0.95 and 0.92 of plain decoding
(8 and 16 texts on a Zen 5, `selfspec bench --concurrency`), at 0.43 1.06."""


class PausableDrafter:
    """Wraps a drafter: no drafts while `pauses()` is true; other rounds are reported to `learn`."""

    def __init__(
        self,
        drafter: Drafter,
        pauses: Callable[[], bool],
        learn: Callable[[Draft, Sequence[int]], None] = lambda *_: None,
    ) -> None:
        self._drafter, self._pauses, self._learn, self._was_asked = drafter, pauses, learn, False

    def draft(self, state: DecodeState, limit: int, watch: Stopwatch) -> Steps[Draft]:
        self._was_asked = not self._pauses()
        return self._drafter.draft(state, limit, watch) if self._was_asked else no_work(Draft())

    def learn(self, draft: Draft, kept: Sequence[int]) -> None:
        if self._was_asked:
            self._learn(draft, kept)
            self._drafter.learn(draft, kept)


# --- trees: a Guesser gives the tokens that may follow, so nothing here depends on a model

_ROUNDING = 1e-6
_REMEMBERED = 16  # past answers of the head from which the value of the next one is estimated
LEAST_CHANCE = 0.05  # the head is not asked after a path to which it gives a lower probability
_PRIOR_CHANCE = 0.5  # assumed probability of the head's best guess before it is first asked


class _Node(NamedTuple):
    at: int  # index of a token of the draft, or ROOT
    free: float  # its chance, minus the chance of its child in the trunk
    child: int | None  # index of that child, if any


class _Offer(NamedTuple):
    """A guess that may become a token of the tree."""

    chance: float  # probability of the whole path; includes the estimates of prompt lookup
    prob: float  # the head's probability of this token after its parent
    parent: int
    token: int


class TreeDrafter(PacedDrafter):
    """Grows a tree per round. Needs lossless acceptance and an executor that runs trees."""

    def __init__(
        self,
        guesser: Guesser,
        cost: DraftCost,
        controller: DraftController,
        end_tokens: Collection[int] = (),
        *,
        most: int,
        seen: Trunks | None = None,
        never_slower: bool = True,
    ) -> None:
        """`most`: maximum draft tokens of a round. The `controller` sets the longest path."""
        super().__init__(controller, end_tokens)
        self._guesser, self._cost, self._most, self._seen = guesser, cost, most, seen
        self._paying = Paying(cost) if never_slower else None
        self._chances = deque([_PRIOR_CHANCE], maxlen=_REMEMBERED)
        self._trunk = self._draft = Draft()
        self._was_asked = False  # whether the guesser was asked in this round

    def draft(self, state: DecodeState, limit: int, watch: Stopwatch) -> Steps[Draft]:
        seen, self._was_asked = self._seen, False
        self._trunk = Draft() if seen is None else seen.propose(state, min(limit, self._most))
        self._draft = Draft(proposed=list(self._trunk.proposed), ended=self._trunk.ended)
        if limit > 0 and (self._paying is None or not self._paying.pauses()):
            yield from self._grow(state, limit, watch)
            self._sort()
        return self._draft

    def learn(self, draft: Draft, kept: Sequence[int]) -> None:
        if self._seen is not None:
            count = len(self._trunk.proposed)
            self._seen.learn(self._trunk, [index for index in kept if index < count])
        if self._was_asked:
            if self._paying is not None:
                self._paying.learn(draft, kept)
            super().learn(draft, kept)

    @property
    def _is_full(self) -> bool:
        return len(self._draft.proposed) >= self._most

    @property
    def _rate(self) -> float:
        """Expected tokens per step."""
        return self._tokens / self._steps

    @property
    def _least_chance(self) -> float:
        """The chance from which one more token pays for its row."""
        return self._row_costs[len(self._draft.proposed)] * self._rate

    def _grow(self, state: DecodeState, limit: int, watch: Stopwatch) -> Steps[None]:
        self._row_costs = tuple(islice(costs_by_row(self._cost.row_costs), self._most))
        self._tokens = 1.0 + sum(token.chance for token in self._draft.proposed)
        self._steps = 1.0 + sum(self._row_costs[: len(self._draft.proposed)])
        self._path_probs = {ROOT: 1.0}  # the head's probability of each token's path, where asked
        width, level = self.controller.begin(), [ROOT]
        self._guesser.begin(state)
        self._draft.ended = "width" if width <= limit else "budget"
        for _ in range(min(width, limit)):
            nodes = self._nodes_to_ask(level)
            if not nodes:
                self._draft.ended = "width" if self._is_full else "unsure"
                return
            if not (self._was_asked and self._guesser.asks_once):
                self._draft.heads += 1
                self._steps += self._cost.head_call
            self._was_asked = True
            indices = [node.at for node in nodes]
            answers = yield from self._guesser.ask(self._draft, indices, watch)
            level = self._add(nodes, answers)
            if level and all(map(self._is_end, level)):
                self._draft.ended = "eos"
                return

    def _node(self, index: int) -> _Node:
        proposed = self._draft.proposed
        chance = 1.0 if index == ROOT else proposed[index].chance
        child = index + 1  # the trunk's tokens come first, in order
        if child < len(proposed) and proposed[child].parent == index:
            return _Node(index, max(chance - proposed[child].chance, 0.0), child)
        return _Node(index, chance, None)

    def _is_end(self, index: int) -> bool:
        return index != ROOT and self._draft.proposed[index].token in self.end_tokens

    def _nodes_to_ask(self, level: Sequence[int]) -> list[_Node]:
        """Nodes after which a guess should pay for its row, if together they pay for the head."""
        if self._is_full:
            return []
        if level == [ROOT] and not self._draft.proposed:  # else improved guesses go unnoticed
            return [self._node(ROOT)]
        row, least = self._least_chance, 0.0 if self._guesser.asks_once else LEAST_CHANCE
        indices = (at for at in level if not self._is_end(at))
        nodes = [self._node(at) for at in indices if self._path_probs.get(at, 0.0) >= least]
        # expected gain of the best guess after each, net of its row
        gains = [
            sum(max(node.free * best - row, 0.0) for best in self._chances) / len(self._chances)
            for node in nodes
        ]
        paid = self._was_asked and self._guesser.asks_once
        if sum(gains) <= (0.0 if paid else self._cost.head_call * self._rate):
            return []
        return [node for node, gain in zip(nodes, gains, strict=True) if gain > 0.0]

    def _add(self, nodes: Sequence[_Node], answers: Sequence[Likeliest]) -> list[int]:
        """Add the guesses that pay; returns the next level, including the trunk's tokens."""
        level, offers = [], []
        for node, guesses in zip(nodes, answers, strict=True):
            if guesses.chances:
                self._chances.append(guesses.chances[0])
            child_chance = 0.0
            if node.child is not None:
                level.append(node.child)
                guesses, child_chance = guesses.without(self._draft.proposed[node.child].token)
                self._path_probs[node.child] = self._path_probs.get(node.at, 0.0) * child_chance
            share = node.free / max(1.0 - child_chance, _ROUNDING)
            offers += [
                _Offer(min(share * prob, node.free), prob, node.at, token)
                for token, prob in zip(guesses.tokens, guesses.chances, strict=True)
            ]
        proposed, source = self._draft.proposed, self._guesser.source
        for chance, prob, parent, token in sorted(offers, key=lambda offer: -offer.chance):
            if self._is_full or chance <= self._least_chance:
                break
            at = len(proposed)
            proposed.append(DraftToken(token, parent, source=source, chance=chance))
            self._steps += self._row_costs[at]
            self._tokens += chance
            self._path_probs[at] = self._path_probs.get(parent, 0.0) * prob
            level.append(at)
        return level

    def _sort(self) -> None:
        """Sort depth first, likeliest child first, so the best path is a chain of leading rows."""
        old, children = self._draft.proposed, dict[int, list[int]]()
        for index, token in enumerate(old):
            children.setdefault(token.parent, []).append(index)
        order, stack = list[int](), children.get(ROOT, [])[::-1]
        while stack:
            order.append(stack.pop())
            stack += children.get(order[-1], [])[::-1]
        places = {ROOT: ROOT} | {at: new for new, at in enumerate(order)}
        self._draft.proposed = [old[at]._replace(parent=places[old[at].parent]) for at in order]
