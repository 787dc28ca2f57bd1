"""Drafts from successors: what the table keeps, what it promises, and that no text changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from selfspec.api.speculator import wrap
from selfspec.decoding.acceptance import Proposed, Target, Verdict
from selfspec.decoding.drafters import successors
from selfspec.decoding.drafters.base import Draft
from selfspec.decoding.drafters.heads import ROOT
from selfspec.decoding.drafters.successors import Remembering, SuccessorGuesser, Successors
from selfspec.decoding.stats import Stopwatch
from selfspec.decoding.work import alone
from tests import ladder
from tests.models import make_model, needs_compiler, random_ids


def test_two_tokens_come_before_one_and_the_newest_entry_counts() -> None:
    table = Successors()
    assert table.behind([1, 2]).tokens == []
    table.learn([1, 2], [5, 6], 5)
    table.learn([3, 2], [7, 8], 7)
    assert list(table.behind([1, 2]).tokens) == [5, 6]
    assert list(table.behind([9, 2]).tokens) == [7, 8]  # by the last token alone
    table.learn([1, 2], [6, 5], 6)
    assert list(table.behind([1, 2]).tokens) == [6, 5]


def test_chances_follow_what_was_right_and_fall() -> None:
    table = Successors()
    table.learn([1, 2], [5, 6], 5)
    before = table.behind([1, 2]).chances
    for _ in range(300):
        table.learn([1, 2], [5, 6], 6)
    after = table.behind([1, 2]).chances
    assert after[0] < before[0]
    assert list(after) == sorted(after, reverse=True)


def test_the_oldest_entries_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(successors, "_MOST", 2)
    table = Successors()
    for first in (1, 2, 1, 3):
        table.learn([first, first], [first + 10], 0)
    assert [list(table.behind([n, n]).tokens) for n in (1, 2, 3)] == [[11], [], [13]]


def test_a_rule_tells_the_table_each_row_and_decides_as_before() -> None:
    class First:
        lossless = True

        def verdict(self, *_: Any) -> Verdict:
            return Verdict(3)

    table, logits = Successors(), torch.tensor([[0.0, 2.0, 1.0, 3.0], [4.0, 0.0, 1.0, 2.0]])
    rule = Remembering(First(), table, [7, 8])
    proposed: Sequence[Proposed] = []
    assert rule.verdict(torch.zeros(1, 2), Target(logits), 0, proposed).token == 3
    rule.verdict(torch.zeros(1, 3), Target(logits), 1, proposed)
    assert list(table.behind([7, 8]).tokens) == [3, 1, 2, 0]
    assert list(table.behind([8, 3]).tokens) == [0, 3, 2, 1]


def test_a_level_is_asked_behind_the_paths_of_its_tokens() -> None:
    table = Successors()
    table.learn([1, 2], [5, 6, 7], 5)
    table.learn([2, 5], [8], 8)
    guesser = SuccessorGuesser(table, 2)

    class Text:
        def committed(self, start: int) -> list[int]:
            return [1, 2][start:]

    guesser.begin(Text())
    draft = Draft(tokens=[5, 6], parents=[-1, -1])
    found = alone(guesser.ask(draft, [ROOT, 0, 1], Stopwatch()))
    assert [[guess.choice(n) for n in range(len(guess.chances))] for guess in found[1:]] == [
        [(8, None, None)],
        [],
    ]
    assert len(found[0].chances) == 2


@pytest.mark.parametrize("executor", ["generic", pytest.param("fused", marks=needs_compiler)])
@pytest.mark.parametrize("drafter", ["successors", "ngram+successors"])
def test_a_text_stays_what_it_is_and_is_drafted_when_it_comes_again(
    drafter: str, executor: str
) -> None:
    speculator = wrap(make_model("llama"), executor=executor, drafter=drafter, prices="row=0.01")
    many: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
    ids = random_ids(9)
    plain = speculator.generate(ids, speculate=False, **many)
    found = [speculator.generate(ids, **many) for _ in range(2)]
    assert [one.token_ids for one in found] == [plain.token_ids] * 2
    assert found[1].stats.accepted_by_source["successors"] > 6
    chains = speculator.generate(ids, controller="threshold", **many)
    assert chains.token_ids == plain.token_ids


def test_sampled_sequences_have_the_distribution_of_the_model() -> None:
    model = make_model("llama", vocab_size=4, num_hidden_layers=2)
    ladder.check_sampling(model, random_ids(3, vocab_size=4), drafter="successors:max_tokens=2")
