"""Drafts from text already seen: what is found, what is proposed, and what is learnt from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from selfspec.api.speculator import wrap
from selfspec.decoding.controllers import DraftController, Fixed
from selfspec.decoding.drafters.base import Draft, DraftsFrom
from selfspec.decoding.drafters.ngram import NgramDrafter, NgramIndex, SeenTextFirst
from selfspec.decoding.prices import DraftCost
from selfspec.decoding.stats import Stopwatch
from selfspec.decoding.work import Steps, alone, ready
from tests.models import make_model, needs_compiler, random_ids


class Text:
    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def committed(self, start: int) -> list[int]:
        return self.tokens[start:]


def ask(drafter: DraftsFrom[Text], text: Text, limit: int = 99) -> Draft:
    return alone(drafter.draft(text, limit, Stopwatch()))


def make_drafter(width: int = 4, rows: tuple[float, ...] = (0.15,), **options: Any) -> NgramDrafter:
    return NgramDrafter(Fixed(width), size=3, cost=DraftCost(rows=rows), **options)


def naive(text: list[int], size: int) -> tuple[int, int]:
    """The definition: the longest n-gram at the end that was continued, its newest continuation."""
    for count in range(min(size, len(text)), 0, -1):
        for place in range(len(text) - 1, count - 1, -1):
            if text[place - count : place] == text[-count:]:
                return count, place
    return 0, len(text)


# The index


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_the_growing_index_finds_what_a_search_of_the_whole_text_finds(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    text = torch.randint(4, (150,), generator=generator).tolist()
    index = NgramIndex(size)
    matches = set()
    for start in range(0, 150, 3):  # a round commits several tokens
        index.extend(text[start : start + 3])
        assert index.find() == naive(text[: start + 3], size)
        matches.add(index.find()[0])
    assert matches >= set(range(1, min(size, 4)))
    assert index.text == text


@pytest.mark.parametrize(
    ("text", "found", "copy"),
    [
        ([], (0, 0), []),
        ([1, 2, 3], (0, 3), []),  # a new word
        ([1, 2, 7, 1, 2, 8, 1, 2], (2, 5), [8, 1, 2, 8]),  # the newest of equal matches
        ([9, 1, 2, 1, 2], (2, 3), [1, 2, 1, 2, 1, 2, 1]),  # a copy goes on in itself
        ([1, 5, 5], (1, 2), [5, 5, 5]),
    ],
)
def test_matches_and_copies_by_hand(
    text: list[int], found: tuple[int, int], copy: list[int]
) -> None:
    index = NgramIndex(3)
    index.extend(text)
    assert index.find() == found
    if copy:
        assert index.copied(found[1], len(copy)) == copy


# The drafter


def test_the_continuation_of_the_longest_match_is_drafted() -> None:
    text = Text([1, 2, 3, 4, 5, 9, 3, 8, 1, 2, 3])
    draft = ask(make_drafter(), text)
    assert (draft.tokens, draft.exit_layers) == ([4, 5, 9, 3], [0] * 4)
    assert (draft.probs, {*draft.sources}, draft.ended) == (None, {"ngram"}, "width")


def test_the_limit_and_an_end_token_close_a_draft() -> None:
    text = [1, 2, 3, 4, 5, 9, 1, 2, 3]
    assert (ask(make_drafter(), Text(text), limit=2).ended) == "budget"
    drafter = make_drafter(end_tokens=[5])
    draft = ask(drafter, Text(text))
    assert (draft.tokens, draft.ended) == ([4, 5], "eos")
    assert ask(make_drafter(), Text(text), limit=0).tokens == []


def test_drafting_stops_where_another_row_would_lower_the_tokens_per_time() -> None:
    # a match of one token starts at 1/4, of two at 1/2, of three at 3/4: at a cost of 0.09
    # 1.25 tokens in 1.09 steps, 1.375 in 1.18, which is more, and 1.469 in 1.27, which is less
    chances = {0.26: 0, 0.24: 1, 0.12: 1, 0.09: 2, 0.06: 3, 0.0: 6}
    for cost, expected in chances.items():
        drafter = make_drafter(width=6, rows=(cost,))
        assert len(ask(drafter, Text([1, 2, 3, 4, 5, 6, 7, 1])).tokens) == expected, cost


@needs_compiler
def test_a_block_costs_more_where_one_row_has_kernels_of_its_own() -> None:
    ids = torch.arange(96)[None]  # whatever comes was there before: a chance of 1/2
    options: dict[str, Any] = {"drafter": "ngram:size=1,max_tokens=1"}
    for executor, expected in (("generic", False), ("fused", True)):
        speculator = wrap(make_model("llama"), executor=executor, **options)
        stats = speculator.generate(ids, max_new_tokens=6).stats
        assert (stats.drafted > 0) is expected


@needs_compiler
def test_a_row_costs_more_from_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    speculator = wrap(make_model("llama"), executor="fused", drafter="ngram:size=1,max_tokens=1")
    ids = torch.arange(96)[None]  # a chance of 1/2
    assert speculator.generate(ids, max_new_tokens=6).stats.drafted > 0
    dear = replace(speculator.backbone.claims, row_costs=(0.6,))
    monkeypatch.setattr(speculator.backbone._executor, "claims", dear)
    assert speculator.generate(ids, max_new_tokens=6).stats.drafted == 0
    asked = speculator.generate(ids, max_new_tokens=6, prices="row=0.08")
    assert asked.stats.drafted > 0  # what was asked for counts


def test_a_draft_must_promise_what_its_first_row_costs() -> None:
    # chances 1/4, 1/8, 3/32, 0.07: 0.54 tokens in all
    for cost, expected in ((0.5, 4), (0.6, 0)):
        drafter = make_drafter(rows=(cost, 0.0))
        assert len(ask(drafter, Text([1, 2, 3, 4, 5, 6, 7, 1])).tokens) == expected
    assert ask(make_drafter(), Text([1, 2, 3])).ended == "off"
    assert ask(make_drafter(rows=(0.3,)), Text([1, 2, 1])).ended == "unsure"


def test_wrong_guesses_end_the_proposals_and_right_ones_bring_them_back_unproposed() -> None:
    # 1 is followed by anything but what followed it before
    drafter, text = make_drafter(), Text([1, 2, 1])
    proposed = []
    for token in range(3, 23):
        proposed.append(bool(ask(drafter, text).tokens))
        text.tokens += [token, 1]
    # 0.25 * (7/8)^3 = 0.167, then 0.147: four wrong guesses are the price of learning
    assert proposed == [True] * 4 + [False] * 16
    proposed = []
    for count in range(4):  # now it is always 50, which the drafter guesses without proposing
        text.tokens += [50, 60 + count, 1]
        proposed.append(bool(ask(drafter, text).tokens))
    # wrong once more, then right: 0.014, 0.137, 0.245, 0.339
    assert proposed == [False, False, True, True]


def test_a_guess_is_scored_up_to_its_first_wrong_token() -> None:
    drafter, text = make_drafter(rows=(0.0,)), Text([1, 2, 3, 4, 5, 6, 1])
    assert ask(drafter, text).tokens == [2, 3, 4, 5]
    text.tokens += [2, 3, 9, 5]  # more than the guess was right for: another drafter's tokens
    ask(drafter, text)
    # two right, behind matches of one and two; the third wrong; the fourth no longer a guess
    assert drafter._rates == [0.0, 0.25 + 0.75 / 8, 0.5 + 0.5 / 8, 0.75 - 0.75 / 8]


class Listening(Fixed):
    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.asked: list[float] = []
        self.heard: list[tuple[int, int]] = []

    def go_on(self, confidence: float) -> bool:
        self.asked.append(confidence)
        return confidence < 0.7

    def end(self, drafted: int, accepted: int) -> None:
        self.heard.append((drafted, accepted))


def test_the_controller_hears_the_rate_of_each_match_and_ends_the_draft() -> None:
    controller = Listening(6)
    drafter = NgramDrafter(controller, size=3)
    draft = ask(drafter, Text([1, 2, 3, 4, 5, 6, 1]))
    assert controller.asked == [0.25, 0.5, 0.75]
    assert (draft.tokens, draft.ended) == ([2, 3, 4], "unsure")
    drafter.learn(Draft(tokens=[1, 2, 3]), [0, 1])
    drafter.learn(Draft(), [])
    assert controller.heard == [(3, 2)]


# Together with another drafter


class Other:
    """Drafts 90, 91, ..; notes what it is asked and told."""

    def __init__(self) -> None:
        self.asked = 0
        self.heard: list[tuple[int, int]] = []

    def draft(self, state: Text, limit: int, watch: Stopwatch) -> Steps[Draft]:
        self.asked += 1
        return ready(Draft(tokens=[90, 91][:limit], exit_layers=[4, 4][:limit]))

    def learn(self, draft: Draft, kept: Sequence[int]) -> None:
        self.heard.append((len(draft.tokens), len(kept)))


def test_the_other_drafts_where_no_text_matches_and_hears_only_of_its_own() -> None:
    controller = Listening(1)
    other = Other()
    both = SeenTextFirst(NgramDrafter(cast(DraftController, controller), size=3), other)
    text = Text([1, 2, 3])
    draft = ask(both, text)
    assert draft.tokens == [90, 91]
    both.learn(draft, [0])
    text.tokens += [1]
    draft = ask(both, text)
    assert draft.tokens == [2]
    both.learn(draft, [0])
    assert (other.asked, other.heard, controller.heard) == (1, [(2, 1)], [(1, 1)])


def test_seen_text_has_to_promise_more_than_the_other_has_been_giving() -> None:
    both = SeenTextFirst(make_drafter(width=1), Other())
    text = Text([1, 2, 3, 4, 5])
    for _ in range(2):  # 1/8 after the first, 0.234 after the second: below 1/4
        both.learn(ask(both, text), [0])
    assert ask(both, Text([*text.tokens, 1])).sources == ["ngram"]
    both = SeenTextFirst(make_drafter(width=1), Other())
    for _ in range(3):  # 0.33 after the third
        both.learn(ask(both, text), [0])
    assert ask(both, Text([*text.tokens, 1])).tokens == [90, 91]


# Through the facade


def test_a_conversation_that_reuses_its_prefix_drafts_from_all_of_it(exact: Any) -> None:
    speculator = wrap(exact, drafter="ngram:size=2", prices="row=0.0")
    session = speculator.session()
    first = random_ids(9)
    answer = session.generate(first, max_new_tokens=8)
    turn = torch.tensor([[*first[0].tolist(), *answer.token_ids[:5], 3, *first[0, :4].tolist()]])
    with speculator.disabled():
        plain = speculator.generate(turn, max_new_tokens=20)
    again = session.generate(turn, max_new_tokens=20)
    assert again.stats.reused_tokens >= 14
    assert again.token_ids == plain.token_ids
    assert again.stats.drafted_by_source["ngram"] > 0
    alone = speculator.generate(turn, max_new_tokens=20)
    assert alone.stats.drafted == again.stats.drafted
