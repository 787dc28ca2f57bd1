"""The tree drafter: how wide a tree grows at which price, and that sampling from it is exact."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList

from selfspec.decoding.acceptance import SpeculativeSampling
from selfspec.decoding.controllers import Fixed
from selfspec.decoding.drafters.base import Draft
from selfspec.decoding.drafters.heads import Drawn, Guesses, Known, Siblings, TreeDrafter
from selfspec.decoding.drafters.ngram import NgramDrafter
from selfspec.decoding.prices import DraftCost
from selfspec.decoding.sampling import Sampler
from selfspec.decoding.stats import EXIT, Stopwatch
from selfspec.decoding.work import Steps, alone, ready
from selfspec.model.backbone import Backbone
from tests import ladder, laws
from tests.decoding.test_ngram import Text
from tests.models import make_model, random_ids

BEST = ((10, 0.5), (11, 0.25), (12, 0.1))
"""What `Fan` guesses behind any token."""


class Fan:
    """Guesses the same everywhere; notes what it is asked."""

    layer = 0
    source = EXIT

    def __init__(self, best: Sequence[tuple[int, float]] = BEST) -> None:
        self.best = best
        self.asked: list[list[int]] = []

    def begin(self, state: Text) -> None:
        self.asked.append([])

    def ask(self, draft: Draft, asked: Sequence[int], watch: Stopwatch) -> Steps[list[Guesses]]:
        self.asked[-1].append(len(asked))
        return ready([Known(*map(list, zip(*self.best, strict=True))) for _ in asked])


def grown(
    rows: Sequence[float] = (0.0,),
    *,
    head: float = 0.0,
    depth: int = 9,
    most: int = 15,
    limit: int = 99,
    text: Sequence[int] = (1,),
    fan: Fan | None = None,
    ends: Sequence[int] = (),
    trunk: bool = False,
) -> Draft:
    cost = DraftCost(rows=tuple(rows), head=head)
    seen = NgramDrafter(Fixed(7), size=3, cost=cost) if trunk else None
    drafter = TreeDrafter(
        fan or Fan(), cost, Fixed(depth), ends, most=most, seen=seen, never_slower=False
    )
    return alone(drafter.draft(Text(list(text)), limit, Stopwatch()))


def paths(draft: Draft) -> set[tuple[int, ...]]:
    found = [draft.path(index) for index in range(len(draft.tokens))]
    return {tuple(draft.tokens[index] for index in path) for path in found}


def test_a_price_sets_the_width_of_a_tree() -> None:
    """A row is worth its path's chance over the tokens that are expected per step."""
    assert grown([0.9]).tokens == []
    assert paths(grown([0.3])) == {(10,)}
    assert paths(grown([0.15])) == {(10,), (11,), (10, 10)}
    wide = grown([0.001], depth=2)
    assert paths(wide) == {(a,) for a in (10, 11, 12)} | {*product((10, 11, 12), (10, 11, 12))}
    sizes = [len(grown([price]).tokens) for price in (0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 1.0)]
    assert sizes == sorted(sizes, reverse=True)
    assert (sizes[0], sizes[-1]) == (15, 0)
    assert len(grown([0.0, 0.0, 0.0, 9.0]).tokens) == 3  # rows may cost more the more there are


def test_a_head_is_asked_as_long_as_it_should_pay() -> None:
    for head, levels in ((0.0, 3), (0.15, 2), (9.0, 1)):
        fan = Fan()
        draft = grown([0.05], head=head, fan=fan, depth=4, most=99)
        assert len(fan.asked[0]) == draft.heads == levels
    assert fan.asked == [[1]]  # the newest token is asked about whatever that costs


def test_a_tree_ends_at_its_longest_path_its_rows_the_limit_and_an_end_token() -> None:
    assert (grown(depth=1).depth, grown(depth=1).ended) == (1, "width")
    assert (grown(limit=2).depth, grown(limit=2).ended) == (2, "budget")
    full = grown(most=4)
    assert (len(full.tokens), full.ended) == (4, "width")
    assert grown(limit=0).tokens == []
    closed = grown([0.01], ends=[10, 11, 12])
    assert (closed.depth, closed.ended, closed.heads) == (1, "eos", 1)
    assert all(10 not in path[:-1] for path in paths(grown([0.01], ends=[10])))


def test_the_likeliest_path_comes_first_so_that_keeping_it_moves_nothing() -> None:
    draft = grown([0.02], depth=3)
    assert draft.tokens[:3] == [10, 10, 10]
    assert draft.parents is not None
    assert draft.parents[:3] == [-1, 0, 1]
    assert all(parent < index for index, parent in enumerate(draft.parents))
    for index, chance in enumerate(draft.chances):
        expected = math.prod(dict(BEST)[draft.tokens[one]] for one in draft.path(index))
        assert chance == pytest.approx(expected)


def test_text_already_seen_is_the_trunk_and_heads_stand_beside_and_behind_it() -> None:
    text = [1, 2, 3, 4, 1, 2, 3]  # 4, 1, 2, 3 .. followed before
    alone = grown([0.01], text=text, trunk=True, fan=Fan([(4, 0.5), (9, 0.3)]), depth=0)
    assert alone.sources == ["ngram"] * len(alone.tokens)
    draft = grown([0.01], text=text, trunk=True, fan=Fan([(4, 0.5), (9, 0.3)]), depth=2)
    trunk = [index for index, source in enumerate(draft.sources) if source == "ngram"]
    assert [draft.tokens[index] for index in trunk] == alone.tokens
    beside = [i for i, source in enumerate(draft.sources) if source == "exit"]
    assert [draft.tokens[index] for index in draft.following(0)] == [4, 9]  # nothing twice
    first = next(index for index in beside if len(draft.path(index)) == 1)
    left = 1.0 - draft.chances[trunk[0]]
    assert draft.chances[first] == pytest.approx(left * 0.3 / 0.5)  # 4 is taken: what is left


def test_a_sure_trunk_is_left_alone() -> None:
    fan, cost = Fan(), DraftCost(rows=(0.1,), head=0.1)
    seen = NgramDrafter(Fixed(7), size=3, cost=cost)
    seen._rates = [0.99] * 4
    drafter = TreeDrafter(fan, cost, Fixed(3), most=15, seen=seen)
    draft = alone(drafter.draft(Text([1, 2, 3, 1, 2]), 9, Stopwatch()))
    assert (fan.asked, {*draft.sources}, draft.parents) == ([[]], {"ngram"}, None)


def test_heads_that_are_always_wrong_are_paused_and_text_already_seen_goes_on() -> None:
    fan, cost = Fan([(99, 0.9)]), DraftCost(rows=(0.1,), head=0.1)
    seen = NgramDrafter(Fixed(2), size=2, cost=cost)
    drafter = TreeDrafter(fan, cost, Fixed(1), most=15, seen=seen)
    text, asked = Text([]), []
    for step in range(300):
        text.tokens.append(step + 100)  # nothing comes twice
        draft = alone(drafter.draft(text, 9, Stopwatch()))
        asked.append(draft.heads)
        drafter.learn(draft, [])
    assert asked[:5] == [1] * 5
    assert sum(asked[-130:]) <= 2
    text.tokens += [100, 101]
    copied = alone(drafter.draft(text, 9, Stopwatch()))
    assert (copied.tokens[0], {*copied.sources}, copied.heads) == (102, {"ngram"}, 0)


# Sampling


def test_a_token_that_the_trunk_has_is_not_drawn_again() -> None:
    sampler = Sampler(LogitsProcessorList(), do_sample=True)
    rest, taken = Drawn(torch.tensor([0.5, 0.3, 0.2]), sampler, 3, place=1).without(0)
    assert taken == 0.5
    assert rest.chances == pytest.approx([0.3, 0.2])
    drawn = [rest.choice(rank) for rank in range(3)]
    assert {choice.token for choice in drawn if choice is not None} == {1, 2}
    assert drawn[2] is None


class Draws:
    """Draws what follows a token from a table of laws [V, V]."""

    layer = 0
    source = EXIT

    def __init__(self, table: Tensor, sampler: Sampler, count: int) -> None:
        self.table, self.sampler, self.count = table, sampler, count

    def begin(self, state: laws.Words) -> None:
        self.state = state

    def ask(self, draft: Draft, asked: Sequence[int], watch: Stopwatch) -> Steps[list[Guesses]]:
        last = [self.state.tokens[-1] if at < 0 else draft.tokens[at] for at in asked]
        places = [len(self.state.tokens) + len(draft.path(at)) for at in asked]
        laws_of = [self.table[token] for token in last]
        both = zip(laws_of, places, strict=True)
        return ready([Drawn(law, self.sampler, self.count, place) for law, place in both])


class Copied:
    """A trunk of the given tokens."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = list(tokens)

    def propose(self, state: laws.Words, limit: int) -> Draft:
        tokens = self.tokens[:limit]
        chances = [0.3 ** (index + 1) for index in range(len(tokens))]
        return Draft(tokens=tokens, chances=chances, sources=["ngram"] * len(tokens))

    def learn(self, draft: Draft, kept: Sequence[int]) -> None: ...


@pytest.mark.parametrize("trunk", [(), (2,), (1, 3)], ids=str)
@pytest.mark.parametrize(("guesses", "depth", "most"), [(2, 1, 2), (3, 1, 3), (2, 2, 3), (4, 2, 3)])
def test_sampling_from_a_tree_is_exact(
    guesses: int, depth: int, most: int, trunk: tuple[int, ...]
) -> None:
    """Every outcome of every draw is played: the law of what is committed is the target's."""
    sampler = laws.ExactSampler(LogitsProcessorList(), do_sample=True)
    rule = SpeculativeSampling(sampler)
    sizes = set()

    def play() -> tuple[int, ...]:
        words = laws.Words(0)
        drafter: TreeDrafter[Any] = TreeDrafter(
            Draws(laws.DRAFTS, sampler, guesses),
            DraftCost(rows=(0.0,)),
            Fixed(depth),
            most=most + len(trunk),
            seen=cast(NgramDrafter, Copied(trunk)) if trunk else None,
            sampled=True,
        )
        draft = alone(drafter.draft(words, 9, Stopwatch()))
        sizes.add((len(draft.tokens), draft.parents is not None))
        laws.verdicts(rule, words, laws.TARGETS[[0, *draft.tokens]].log(), draft)
        return tuple(words.tokens[1:])

    found = laws.completed(laws.enumerate_law(sampler, play), 4)
    assert any(branches for _, branches in sizes)
    for tokens, chance in found.items():
        assert chance == pytest.approx(laws.chance((0, *tokens), laws.TARGETS), abs=1e-6), tokens


@pytest.mark.parametrize(
    "drafter",
    ["ngram+exit:layers=0,threshold=0.01", "exit:layers=3,threshold=0.01"],
    ids=["trees", "siblings"],
)
def test_sampled_sequences_follow_the_model_s_law_with_trees(drafter: str) -> None:
    model = make_model("llama", torch.float64, vocab_size=8)
    heads = ladder.deep_heads(Backbone(model, executor="generic"))
    ladder.check_sampling(
        model,
        random_ids(5) % 8,
        draws=800,
        heads=heads,
        drafter=f"{drafter},guesses=3,max_rows=5,max_tokens=2",
        prices="row=0,head=0",
        executor="generic",
    )


@pytest.mark.parametrize(("row", "beside"), [(0.0, 3), (0.9, 0)])
def test_deeper_layers_have_siblings_beside_their_chains_where_these_pay(
    row: float, beside: int
) -> None:
    backbone = Backbone(make_model("llama", torch.float64), executor="generic")
    cost = DraftCost(rows=(row,), num_layers=backbone.num_layers)
    drafter = ladder.exit_drafter(
        backbone, 0.01, width=2, siblings=Siblings(3, cost, most=2 + beside)
    )
    chain = ladder.exit_drafter(backbone, 0.01, width=2)
    ids = random_ids(9)
    found, plain = (
        ladder.decode(backbone, ids, each, new_tokens=30, exit_layers=ladder.EXITS)
        for each in (drafter, chain)
    )
    assert found.tokens == plain.tokens
    full = [entry for entry in found.entries if len(entry.draft_tokens) == 2 + beside]
    assert full
    for entry in full:
        assert entry.parents is None or set(entry.parents[2:]) <= {-1, 0}
        # siblings run in verification alone: no pass of drafting has more rows for them
        assert entry.passes[0][0] == 1
    accepted = [sum(entry.accepted for entry in each.entries) for each in (found, plain)]
    assert accepted[0] >= accepted[1]


def test_a_decision_that_sees_the_drawn_token_would_be_found() -> None:
    """The mutant: a likely draw is drawn again. The enumeration must see it."""

    class Picky(Drawn):
        def choice(self, rank: int) -> Any:
            choice = super().choice(rank)
            return super().choice(rank) if choice is not None and choice.token == 1 else choice

    sampler = laws.ExactSampler(LogitsProcessorList(), do_sample=True)
    rule = SpeculativeSampling(sampler)

    def play() -> tuple[int, ...]:
        words = laws.Words(0)
        choice = Picky(laws.DRAFTS[0], sampler, 2, place=1).choice(0)
        assert choice.law is not None
        draft = Draft(tokens=[choice.token], probs=[choice.law])
        laws.verdicts(rule, words, laws.TARGETS[[0, choice.token]].log(), draft)
        return tuple(words.tokens[1:])

    found = laws.completed(laws.enumerate_law(sampler, play), 2)
    off = max(abs(p - laws.chance((0, *t), laws.TARGETS)) for t, p in found.items())
    assert off > 0.01
