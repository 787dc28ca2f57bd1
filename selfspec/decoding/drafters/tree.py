"""Trees of drafts: text already seen is the trunk, guesses of heads stand beside and behind it.

A tree grows level by level, the likeliest paths first, as long as a further row raises the tokens
that are expected per time. What a row and a head cost is known (`prices`), so a tree is as wide as
it pays: where rows are dear it is a chain, or nothing. As EAGLE-2 (Li et al. 2024) a path is worth
the product of its tokens' probabilities; as Sequoia (Chen et al. 2024) the hardware sets the size.

Nothing here knows a model: a Guesser says what follows a token. Replay grows the same trees from
records.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from typing import Generic, NamedTuple, Protocol

from selfspec.decoding.controllers import DraftController
from selfspec.decoding.drafters.base import Draft, State_contra, Trunks
from selfspec.decoding.drafters.ngram import StateT
from selfspec.decoding.drafters.paying import Paying
from selfspec.decoding.prices import DraftCost, each_row
from selfspec.decoding.scores import Choice
from selfspec.decoding.sources import EXIT
from selfspec.decoding.stats import Stopwatch
from selfspec.decoding.work import Steps

ROOT = -1
"""In place of a draft token: the newest committed one."""

_ROUNDING = 1e-6

_REMEMBERED = 16
"""Answers of the head that say what the next one should bring."""

LEAST_SAID = 0.05
"""The head is not asked behind a path that it gives a lower probability itself: what it computes
there is of little worth, and a record of all that it could be asked stays small."""

_FIRST_HOPE = 0.5
"""Probability of the head's best guess that is expected before it was ever asked."""


class Guesses(Protocol):
    """What may follow a token, the likeliest first."""

    @property
    def chances(self) -> Sequence[float]:
        """Falling. They depend on the text in front alone, not on what is drawn."""

    def choice(self, rank: int) -> Choice | None:
        """The guess of a rank, from 0, asked in order; None: nothing is left to draw."""

    def without(self, token: int) -> tuple[Guesses, float]:
        """All but `token`, with chances as they are, and the chance that it had."""


class Guesser(Protocol[State_contra]):
    """Says what follows the tokens of a draft."""

    layer: int
    """The exit layer that it looks at."""

    def begin(self, state: State_contra) -> None:
        """A round begins: the next draft follows what `state` holds."""

    def ask(self, draft: Draft, asked: Sequence[int], watch: Stopwatch) -> Steps[list[Guesses]]:
        """Behind each of `asked`, tokens of `draft` or ROOT; whose parents were asked before."""


class _Node(NamedTuple):
    """A token of the draft, or ROOT, and what may still follow it."""

    at: int
    free: float
    """Its chance, less that of a child that it has already."""
    child: int | None
    """That child, of the trunk."""


class Offer(NamedTuple):
    """A guess that may become a token of the tree."""

    chance: float
    """Of the whole path, with what text already seen says of it."""
    said: float
    """The head's, of this token behind its parent."""
    parent: int
    rank: int
    guesses: Guesses
    layer: int
    """The exit layer that says so."""


class Tree:
    """A draft while it grows: what it should give, what it costs, what fits."""

    def __init__(
        self,
        trunk: Draft,
        cost: DraftCost,
        most: int,
        ends: Collection[int] = (),
        *,
        paid: float = 0.0,
    ) -> None:
        """`trunk`: a chain with chances, for which steps were `paid` beside its rows.

        `most`: draft tokens. Nothing goes behind `ends`.
        """
        self._said = {ROOT: 1.0}
        """By token: the head's own probability of its path, as far as it was asked."""
        self.draft = trunk
        self.parents = trunk.parents = list(range(-1, len(trunk.tokens) - 1))
        self._cost, self._most, self._ends = cost, most, ends
        self._rows = tuple(islice(each_row(cost.row_costs), most))
        self._tokens = 1.0 + sum(trunk.chances)
        self._steps = 1.0 + sum(self._rows[: len(trunk.tokens)]) + paid

    @property
    def rate(self) -> float:
        """Tokens expected per plain step."""
        return self._tokens / self._steps

    @property
    def full(self) -> bool:
        """Whether no more tokens fit."""
        return len(self.draft.tokens) >= self._most

    @property
    def next_row(self) -> float:
        """The chance at which one more token pays."""
        return self._rows[len(self.draft.tokens)] * self.rate

    def node(self, index: int) -> _Node:
        """ROOT, or a token of the draft."""
        chance = 1.0 if index == ROOT else self.draft.chances[index]
        behind = index + 1  # the trunk's tokens come first, in order
        if behind < len(self.parents) and self.parents[behind] == index:
            return _Node(index, max(chance - self.draft.chances[behind], 0.0), behind)
        return _Node(index, chance, None)

    def closes(self, index: int) -> bool:
        """Whether a token ends the sequence."""
        return index != ROOT and self.draft.tokens[index] in self._ends

    def askable(self, index: int) -> bool:
        """Whether the head can say more there, and would mean it."""
        return not self.closes(index) and self._said.get(index, 0.0) >= LEAST_SAID

    def note(self, index: int, parent: int, said: float) -> None:
        """What the head gives a token behind its parent."""
        self._said[index] = self._said.get(parent, 0.0) * said

    def pay_head(self) -> None:
        """One more level was asked."""
        self.draft.heads += 1
        self._steps += self._cost.asking

    def take(self, offers: Iterable[Offer]) -> list[int]:
        """Add those that pay, the likeliest first; returns their indices."""
        taken: list[int] = []
        for offer in sorted(offers, key=lambda offer: -offer.chance):
            if self.full or offer.chance <= self.next_row:
                break
            choice = offer.guesses.choice(offer.rank)
            if choice is not None:
                taken.append(self._add(offer, choice))
        return taken

    def _add(self, offer: Offer, choice: Choice) -> int:
        """One more token; returns its index."""
        draft, chance = self.draft, offer.chance
        self._steps += self._rows[len(draft.tokens)]
        self._tokens += chance
        self.parents.append(offer.parent)
        draft.tokens.append(choice.token)
        draft.chances.append(chance)
        draft.exit_layers.append(offer.layer)
        draft.sources.append(EXIT)
        if draft.probs is not None:
            draft.probs.append(choice.law)
        self.note(len(draft.tokens) - 1, offer.parent, offer.said)
        return len(draft.tokens) - 1

    def finished(self) -> Draft:
        """Each token's likeliest child behind it, so that the best path is a chain to be kept.

        Without parents if it is a chain as a whole.
        """
        order = self._in_depth()
        places = {ROOT: ROOT} | {old: new for new, old in enumerate(order)}
        draft = self.draft
        draft.tokens = [draft.tokens[old] for old in order]
        draft.chances = [draft.chances[old] for old in order]
        draft.exit_layers = [draft.exit_layers[old] for old in order]
        draft.sources = [draft.sources[old] for old in order]
        if draft.probs is not None:
            draft.probs = [draft.probs[old] for old in order]
        parents = [places[self.parents[old]] for old in order]
        draft.parents = None if parents == list(range(-1, len(order) - 1)) else parents
        return draft

    def _in_depth(self) -> list[int]:
        """All tokens: each before its children, and these, in their order, with all behind them."""
        children: dict[int, list[int]] = {}
        for index, parent in enumerate(self.parents):
            children.setdefault(parent, []).append(index)
        found, waiting = [], children.get(ROOT, [])[::-1]
        while waiting:
            found.append(waiting.pop())
            waiting += children.get(found[-1], [])[::-1]
        return found


class TreeDrafter(Generic[StateT]):
    """Grows a tree per round. Acceptance must be lossless, and the executor run trees."""

    def __init__(
        self,
        guesser: Guesser[StateT],
        cost: DraftCost,
        controller: DraftController,
        end_tokens: Collection[int] = (),
        *,
        most: int,
        seen: Trunks | None = None,
        never_slower: bool = True,
        sampled: bool = False,
    ) -> None:
        """`cost`: what rows and heads cost; `most`: draft tokens of a round.

        The `controller` sets the longest path; `seen` gives trunks. `sampled`: tokens are drawn
        from laws, which acceptance will want.
        """
        self._guesser, self._cost, self._controller = guesser, cost, controller
        self._end_tokens, self._most = frozenset(end_tokens), most
        self._seen = seen
        self._paying = Paying(cost) if never_slower else None
        self._sampled = sampled
        self._best = deque([_FIRST_HOPE], maxlen=_REMEMBERED)
        self._trunk = Draft()
        self._asked = False

    def draft(self, state: StateT, limit: int, watch: Stopwatch) -> Steps[Draft]:
        """A draft of at most `limit` tokens in a path."""
        self._trunk = Draft()
        if self._seen is not None:
            self._trunk = self._seen.propose(state, min(limit, self._most))
        draft = Draft(
            tokens=list(self._trunk.tokens),
            chances=list(self._trunk.chances),
            exit_layers=list(self._trunk.exit_layers),
            sources=list(self._trunk.sources),
            probs=[None] * len(self._trunk.tokens) if self._sampled else None,
            ended=self._trunk.ended,
        )
        self._asked = False
        if limit <= 0 or (self._paying is not None and self._paying.pauses()):
            return draft
        tree = Tree(draft, self._cost, self._most, self._end_tokens)
        yield from self._grow(tree, state, limit, watch)
        return tree.finished()

    def learn(self, draft: Draft, kept: Sequence[int]) -> None:
        """Tell everyone whose tokens were in it."""
        if self._seen is not None:
            count = len(self._trunk.tokens)
            self._seen.learn(self._trunk, [index for index in kept if index < count])
        if self._asked:
            if self._paying is not None:
                self._paying.learn(draft, kept)
            if draft.tokens:
                self._controller.end(draft.depth, len(kept))

    def _grow(self, tree: Tree, state: StateT, limit: int, watch: Stopwatch) -> Steps[None]:
        """Level by level, one question to the head each."""
        width = self._controller.begin()
        level = [ROOT]
        self._guesser.begin(state)
        tree.draft.ended = "width" if width <= limit else "budget"
        for _ in range(min(width, limit)):
            asked = self._worth_asking(tree, level)
            if not asked:
                tree.draft.ended = "width" if tree.full else "unsure"
                return
            self._asked = True
            tree.pay_head()
            nodes = [node.at for node in asked]
            answers = yield from self._guesser.ask(tree.draft, nodes, watch)
            level = self._add(tree, asked, answers)
            if level and all(map(tree.closes, level)):
                tree.draft.ended = "eos"
                return

    def _worth_asking(self, tree: Tree, level: Sequence[int]) -> list[_Node]:
        """Of the newest level those behind which a guess should pay its row, if all pay the head.

        The root is asked whenever text already seen has nothing: else nobody would hear of heads
        that have become better.
        """
        if tree.full:
            return []
        if level == [ROOT] and not tree.draft.tokens:
            return [tree.node(ROOT)]
        row = tree.next_row
        nodes = [tree.node(index) for index in level if tree.askable(index)]
        gains = [self._hope(node.free, row) for node in nodes]
        if sum(gains) <= self._cost.asking * tree.rate:
            return []
        return [node for node, gain in zip(nodes, gains, strict=True) if gain > 0.0]

    def _hope(self, free: float, row: float) -> float:
        """What the best guess behind a node of this chance should bring, its row paid."""
        return sum(max(free * best - row, 0.0) for best in self._best) / len(self._best)

    def _add(self, tree: Tree, asked: Sequence[_Node], answers: Sequence[Guesses]) -> list[int]:
        """The guesses that pay; returns the next level, which the trunk is part of."""
        level, offers = [], []
        for node, guesses in zip(asked, answers, strict=True):
            if guesses.chances:
                self._best.append(guesses.chances[0])
            taken = 0.0
            if node.child is not None:
                level.append(node.child)
                guesses, taken = guesses.without(tree.draft.tokens[node.child])
                tree.note(node.child, node.at, taken)
            share = node.free / max(1.0 - taken, _ROUNDING)
            offers += [
                Offer(
                    min(share * said, node.free), said, node.at, rank, guesses, self._guesser.layer
                )
                for rank, said in enumerate(guesses.chances)
            ]
        return level + tree.take(offers)
