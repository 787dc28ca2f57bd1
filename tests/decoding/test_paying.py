"""The never-slower rule: when drafting pauses, and what that can lose."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import pytest
import torch

from selfspec.api.speculator import wrap
from selfspec.decoding.controllers import Fixed
from selfspec.decoding.drafters.base import Draft
from selfspec.decoding.drafters.heads import LONGEST_PAUSE, SHORTEST_PAUSE, Paying, WhilePaying
from selfspec.decoding.drafters.ngram import NgramDrafter, SeenTextFirst
from selfspec.decoding.prices import DraftCost, Load
from selfspec.decoding.stats import Stopwatch
from selfspec.decoding.work import Steps, alone, ready
from tests import ladder
from tests.decoding.test_ngram import Text
from tests.models import make_model, random_ids

COST = DraftCost(rows=(0.08,), head=0.05, num_layers=12)


def priced(row: float) -> DraftCost:
    """A row is all that costs anything."""
    return DraftCost(rows=(row,), num_layers=10**9)


# When it pauses


class Heads:
    """Drafts a token at layer 3; notes what it hears."""

    def __init__(self) -> None:
        self.heard: list[tuple[int, int]] = []

    def draft(self, state: Text, limit: int, watch: Stopwatch) -> Steps[Draft]:
        return ready(Draft(tokens=[90], exit_layers=[3], heads=1, ended="width"))

    def learn(self, draft: Draft, kept: Sequence[int]) -> None:
        self.heard.append((len(draft.tokens), len(kept)))


ONE = COST.of(alone(Heads().draft(Text([]), 1, Stopwatch())))
"""What a round of `Heads` costs: 0.38 plain steps."""


def play(paying: WhilePaying[Text], right: Sequence[bool]) -> list[bool]:
    """Which rounds drafted, where a draft would have been right or wrong."""
    drafted = []
    for accepted in right:
        draft = alone(paying.draft(Text([]), 9, Stopwatch()))
        drafted.append(bool(draft.tokens))
        assert draft.tokens or draft.ended == "off"
        paying.learn(draft, [0] if accepted and draft.tokens else [])
    return drafted


def runs(drafted: Sequence[bool]) -> list[int]:
    """Lengths of what alternates: rounds that drafted, a pause, .."""
    return [len(list(group)) for _, group in groupby(drafted)]


def test_drafts_that_are_never_right_are_made_in_14_rounds_and_then_in_one_of_65() -> None:
    heads = Heads()
    drafted = play(WhilePaying(heads, COST), [False] * 2000)
    first = math.ceil(math.log(1 + 0.5 / ONE) / math.log(16 / 15))
    assert first == 14
    assert runs(drafted)[:10] == [first, 8, 1, 16, 1, 32, 1, 64, 1, 64]
    assert sum(drafted) == first + 3 + (2000 - first - 8 - 16 - 32 - 3) // 65
    assert heads.heard == [(1, 0)] * sum(drafted)


def test_drafts_that_are_dear_begin_with_a_pause_and_are_made_once_they_pay() -> None:
    dear = DraftCost(rows=(0.3,), head=0.3, num_layers=10**9)
    wrong = runs(play(WhilePaying(Heads(), dear), [False] * 300))
    assert wrong[:6] == [LONGEST_PAUSE // 2, 1, 64, 1, 64, 1]
    right = runs(play(WhilePaying(Heads(), dear), [True] * 300))
    assert right == [LONGEST_PAUSE // 2, 300 - LONGEST_PAUSE // 2]


def test_drafts_that_are_dear_at_the_load_of_the_first_round_begin_with_a_pause() -> None:
    load = Load()
    cost = DraftCost(rows=(0.1,), head=0.1, num_layers=10**9, load=load)
    paying = WhilePaying(Heads(), cost)
    load.texts = 16  # since the text was added
    assert cost.per_token == pytest.approx((16 * 0.1 + 16 * 0.1) / (1 + 15 * 0.1))
    assert runs(play(paying, [False] * 100))[0] == LONGEST_PAUSE // 2


def test_drafts_that_pay_are_always_made() -> None:
    dice = random.Random(0)
    right = [dice.random() < 0.8 for _ in range(500)]
    assert all(play(WhilePaying(Heads(), COST), right))


def test_heads_that_become_right_are_found_again_and_tried_sooner_when_they_fail_again() -> None:
    paying = WhilePaying(Heads(), COST)
    play(paying, [False] * 500)
    drafted = play(paying, [True] * 100)
    assert runs(drafted)[1] == 100 - runs(drafted)[0]  # once found, not lost again
    assert not drafted[0]
    assert runs(drafted)[0] <= LONGEST_PAUSE
    again = runs(play(paying, [False] * 100))
    assert again[1:4] == [SHORTEST_PAUSE, 1, 2 * SHORTEST_PAUSE]


def test_no_sequence_of_drafts_loses_more_than_eight_steps_and_a_round_for_each_pause() -> None:
    worst = 0.0
    for seed in range(200):
        dice = random.Random(seed)
        row = dice.choice([0.02, 0.3, 1.0, 5.0, 20.0])
        paying, rate, gained, pauses, before = WhilePaying(Heads(), priced(row)), 0.5, 0.0, 0, True
        for place in range(400):
            if place % dice.randint(5, 60) == 0:
                rate = dice.choice([0.0, 0.1, 0.5, 1.0])
            right = dice.random() < rate
            (drafts,) = play(paying, [right])
            gained += (right - row) if drafts else 0.0
            pauses += before and not drafts
            before = drafts
            # the pause that this round begins shows in the next one only
            bound = 8.0 + row * (pauses + 1)
            worst = max(worst, -gained / bound)
    assert 0.5 < worst <= 1.0


# Behind text already seen


def test_what_text_already_seen_gives_is_no_gain_of_heads() -> None:
    rule = Paying(DraftCost(rows=(0.1,), head=0.1))
    both = Draft(tokens=[1, 2], sources=["ngram", "exit"], heads=1)
    pauses = 0
    for _ in range(100):
        if rule.pauses():
            pauses += 1
        else:
            rule.learn(both, [0])
    assert pauses > 50


def test_a_pause_is_no_failure_of_the_other_drafter_and_leaves_the_field_to_seen_text() -> None:
    heads = Heads()
    paying = WhilePaying(heads, priced(0.9))
    both = SeenTextFirst(NgramDrafter(Fixed(1), size=3), paying)
    text = Text([1, 2, 3, 4, 5])

    def go(accepted: int) -> Draft:
        draft = alone(both.draft(text, 9, Stopwatch()))
        both.learn(draft, range(min(accepted, len(draft.tokens))))
        return draft

    while not go(1).tokens:  # such dear drafts begin with a pause
        pass
    for _ in range(3):
        assert go(1).sources == ["exit"]  # 0.41 tokens a round by now
    while go(0).tokens:  # no text matches
        pass
    gives = both._other_gives
    heard = len(heads.heard)
    go(0)
    assert (both._other_gives, len(heads.heard)) == (gives, heard)
    both._other_gives = 0.41  # more than the 1/4 that a match of one token promises
    draft = alone(both.draft(Text([*text.tokens, 1]), 9, Stopwatch()))
    assert (draft.sources, draft.tokens) == (["ngram"], [2])


# Through the facade


EAGER = {"exit": "layers=2/5,threshold=0.05", "prices": "row=0.08"}
"""Heads that nobody fitted: they draft all the time, wrongly."""


@pytest.mark.parametrize("drafter", ["exit", "draft-model"])
def test_wrong_drafters_are_paused_and_no_token_changes(drafter: str, exact: Any) -> None:
    second = make_model("llama", torch.float64, num_hidden_layers=2)
    speculator = wrap(exact, heads="logit-lens", draft_model=second, drafter=drafter)
    speculator.options = speculator.options.updated(EAGER)
    ids, count = random_ids(13), 120
    plain = speculator.generate(ids, max_new_tokens=count, speculate=False)
    found = {
        switch: speculator.generate(ids, max_new_tokens=count, never_slower=switch)
        for switch in (True, False)
    }
    assert found[True].token_ids == found[False].token_ids == plain.token_ids
    assert found[False].stats.ended["off"] == 0
    stats = found[True].stats
    # a round costs at least half a step here: eleven rounds, then one after 8, 16, 32 and 64 more
    assert stats.rounds - stats.ended["off"] <= 11 + 4 + 2 * stats.accepted


def test_dearer_heads_are_paused_earlier(exact: Any) -> None:
    speculator = wrap(exact, heads="logit-lens")
    speculator.options = speculator.options.updated(EAGER)
    cheap, dear = (
        speculator.generate(random_ids(13), max_new_tokens=60, prices={"head": cost}).stats.drafted
        for cost in (0.0, 10.0)
    )
    assert cheap > dear > 0


def test_pauses_do_not_change_the_distribution_of_samples() -> None:
    model = make_model("llama", vocab_size=4, num_hidden_layers=2)
    # two wrong drafts cost between 7.5 and 8.5 steps: a pause follows, where one is right none does
    ladder.check_sampling(
        model, random_ids(6, vocab_size=4), draws=600, length=4, prices="head=3.3,row=0.08"
    )
