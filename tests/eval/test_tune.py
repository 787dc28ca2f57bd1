"""Choosing a setting: hand-worked scores and folds, forecasts from a record, what is promised."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from selfspec.api.tuned import TUNED_OPTIONS
from selfspec.config import SpeculationOptions
from selfspec.decoding.costs import Exits, MeasuredCosts, expected
from selfspec.errors import InvalidOption
from selfspec.eval.record import NONE, Record, Setting, replay
from selfspec.eval.tune import (
    Tuned,
    cross_validated,
    folds,
    plain_seconds,
    score,
    screened,
    thresholds,
    tune,
)
from selfspec.options import Costs
from tests.records import FLOOR, OPTIONS, recorded

ROWS = OPTIONS.max_draft_tokens + 1
COSTS = MeasuredCosts(
    num_layers=6,
    layers=tuple(1.0 + 0.1 * row for row in range(ROWS)),
    start=(0.1,) * ROWS,
    logits=tuple(0.3 + 0.01 * row for row in range(ROWS)),
    head=0.05,
    round=0.02,
)
"""Rows are cheap and heads cheaper: drafting pays."""

PLAIN = np.array([10.0, 20.0, 30.0, 40.0])
SECONDS = np.array(
    [
        [10.0, 20.0, 30.0, 40.0],
        [5.0, 10.0, 60.0, 20.0],  # 95 in all, one prompt twice as slow
        [9.0, 18.0, 27.0, 37.0],  # 91 in all
        [20.0, 20.0, 20.0, 20.0],  # 80 in all, one prompt twice as slow
    ]
)


SHORTLIST = 8


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer settings are replayed, which takes most of the time."""
    monkeypatch.setattr("selfspec.eval.tune._SHORTLIST", SHORTLIST)


def unseen(done: int, total: int, words: str) -> None:
    """No progress bar."""


@cache
def best(objective: str = "speed") -> tuple[Tuned, list[tuple[int, int]]]:
    """What is chosen for the translator's record, and the progress that was shown."""
    shown: list[tuple[int, int]] = []
    record = recorded("translator").record
    return tune(record, COSTS, lambda done, of, _: shown.append((done, of)), objective), shown


@cache
def screening(kind: str = "translator") -> tuple[list[SpeculationOptions], np.ndarray]:
    """All settings, and their seconds by the cost model."""
    return screened(recorded(kind).record, COSTS, unseen)


def test_speed_is_a_ratio_of_totals_and_latency_the_fifth_percentile_of_the_prompts() -> None:
    assert score(SECONDS, PLAIN, "speed") == pytest.approx([1.0, 100 / 95, 100 / 91, 100 / 80])
    # of four prompts it lies 15 % of the way from the worst to the second worst
    found = score(SECONDS, PLAIN, "latency")
    assert found[1] == pytest.approx(0.5 + 0.15 * (2.0 - 0.5))
    assert found[2] == pytest.approx(40 / 37 + 0.15 * (10 / 9 - 40 / 37))
    assert found.argmax() == 2  # speed would take the last


def test_each_part_is_judged_by_what_suits_the_others() -> None:
    parts = np.array([0, 0, 1, 1])

    # best on the last two is row 3: 40 seconds; best on the first two is row 1: 15
    def best(some: np.ndarray) -> np.ndarray:
        return np.array(SECONDS[score(SECONDS[:, some], PLAIN[some], "speed").argmax()])

    assert cross_validated(best, parts).tolist() == [20.0, 20.0, 60.0, 20.0]


def ids(record: Record, *names: str) -> Record:
    """The record with other names of its prompts."""
    prompts = tuple(replace(p, id=name) for p, name in zip(record.prompts, names, strict=True))
    return replace(record, prompts=prompts)


def test_turns_of_a_question_are_held_out_together() -> None:
    record = recorded("translator").record
    assert folds(ids(record, "a", "b", "b", "c"), 2).tolist() == [0, 1, 1, 0]
    assert folds(ids(record, "a", "b", "c", "d"), 4).tolist() == [0, 1, 2, 3]
    assert folds(ids(record, "a", "a", "b", "b"), 4).tolist() == [0, 0, 1, 1]
    with pytest.raises(InvalidOption, match="one question cannot be held out"):
        folds(ids(record, "a", "a", "a", "a"), 4)


def test_thresholds_are_quantiles_of_what_was_recorded_and_never_below_the_floor() -> None:
    record = recorded("translator").record
    found = thresholds(record, 5, 0)
    assert found == sorted({round(tau, 3) for tau in found})  # as people would write them
    assert found[0] == FLOOR
    sure = record.confidence[record.roots[record.roots != NONE], 2, 0]
    exits = [(sure >= tau).mean() for tau in found]
    assert exits[0] == (sure >= FLOOR).mean()
    assert 0.0 < exits[-1] < 0.2


def test_every_candidate_can_be_replayed_and_widths_are_neighbours() -> None:
    record = recorded("translator").record
    found = screening()[0]
    assert len(found) == len(set(found)) > 1000
    assert {len(setting.exit.layers or ()) for setting in found} == {1, 2}
    assert [setting.exit.max_tokens for setting in found[:8]] == [1, 2, 3, 4, 1, 2, 3, 4]
    for setting in found[:: len(found) // 50]:
        Setting.of(record, setting)


def exits(record: Record, prompt: int, setting: SpeculationOptions) -> tuple[Exits, Exits]:
    """What the cost model goes by, place by place."""
    asked = Setting.of(record, setting)
    counts: list[list[tuple[int | None, bool]]] = [[], []]

    def look(node: int, place: int) -> int:
        """Note what happens at a node; the node behind a draft that stays."""
        if node == NONE:
            return NONE
        sure = record.confidence[node, list(asked.columns), asked.alpha] >= asked.thresholds
        at = int(sure.argmax()) if sure.any() else None
        column = asked.columns[at or 0]
        right = at is not None and record.tokens[node, column] == record.answers[place + 1]
        counts[step].append((at, right))
        return int(record.children[node, column]) if right else NONE

    start = sum(len(entry.answer) for entry in record.prompts[:prompt])
    for place, node in enumerate(record.prompts[prompt].roots, start):
        for step in range(2):
            node = look(node, place + step)
    layers = range(len(asked.layers))
    first, later = (
        Exits(
            tuple(sum(at == layer for at, _ in seen) / max(len(seen), 1) for layer in layers),
            sum(right for _, right in seen) / max(len(seen), 1),
        )
        for seen in counts
    )
    return first, later


@pytest.mark.parametrize("kind", ["translator", "deep-fused"])
def test_the_cost_model_goes_by_how_often_each_setting_exits(kind: str) -> None:
    record = recorded(kind).record
    settings, found = screening(kind)
    plain = plain_seconds(record, COSTS)
    assert found.shape == (len(settings), len(plain))
    for index in range(0, len(settings), len(settings) // 20):
        setting = settings[index]
        for prompt in range(len(plain)):
            first, later = exits(record, prompt, setting)
            layers, width = setting.exit.layers or (), setting.exit.max_tokens
            gain = expected(COSTS, layers, first, later, width)[1]
            assert found[index, prompt] == pytest.approx(plain[prompt] / gain)


def test_what_the_cost_model_likes_is_fast_when_it_is_replayed() -> None:
    record = recorded("translator").record
    settings, seconds = screening()
    by_model = seconds.sum(-1).argsort()
    likes, dislikes = (
        [followed(record, settings[i]) for i in some] for some in (by_model[:20], by_model[-20:])
    )
    assert max(likes) < plain_seconds(record, COSTS).sum() < min(dislikes)


COSTS_HERE = Costs(row=(0.083, 0.083), head=0.038)
"""What `tune` makes of COSTS: 1.32 a plain step."""


def followed(record: Record, setting: SpeculationOptions) -> float:
    """Seconds on all prompts."""
    return sum(
        COSTS.seconds_of(replay(record, prompt, setting)) for prompt in range(len(record.prompts))
    )


def test_no_setting_is_faster_on_the_prompts_it_was_chosen_on() -> None:
    record = recorded("translator").record
    found, shown = best()
    assert found.speculates
    settings, seconds = screening()
    assert not any(setting.never_slower for setting in settings)
    first = replace(settings[seconds.sum(-1).argmin()], never_slower=True, costs=COSTS_HERE)
    plain = plain_seconds(record, COSTS).sum()
    assert found.speed_up_in_sample >= plain / followed(record, first) - 1e-9
    assert found.speed_up <= found.speed_up_in_sample
    assert found.worst <= found.percentile_5
    # seen text alone, the best few alone and behind it, at two costs of a row; other parts of
    # the prompts may have other best ones
    followed_by = found.settings - len(settings) - 2
    assert 4 * SHORTLIST <= followed_by <= 4 * SHORTLIST * (4 + 1)
    assert found.prompts == 4
    chosen = SpeculationOptions().updated(found.options)
    every = [replay(record, prompt, chosen) for prompt in range(4)]
    behind = [entry for entries in every for entry in entries[1:]]
    rate = sum(len(entry.tokens) for entry in behind) / len(behind)
    assert found.compression_rate == pytest.approx(rate)
    assert f"expect {found.speed_up:.2f} x plain decoding" in found.sentence()
    # what was measured here is what the rules go by
    assert chosen.costs.head == COSTS_HERE.head
    assert chosen.costs.row in (COSTS_HERE.row, Costs().row)
    assert found.options.keys() <= set(TUNED_OPTIONS)
    assert (shown[0], shown[-1]) == ((0, len(settings)), (len(settings), len(settings)))
    latency = best("latency")[0]
    assert latency.objective == "latency"
    assert latency.options != found.options


def repeating(record: Record) -> Record:
    """The record, as if each answer said one thing again and again."""
    said = [7, 8, 9] * 10
    prompts = [replace(one, answer=said[: len(one.answer)]) for one in record.prompts]
    return replace(record, prompts=tuple(prompts))


def test_drafts_from_text_already_seen_are_chosen_where_texts_repeat() -> None:
    record = repeating(recorded("translator").record)
    found = tune(record, COSTS, unseen)
    chosen = SpeculationOptions().updated(found.options)
    assert chosen.uses("ngram")
    assert chosen.ngram.max_tokens == OPTIONS.max_draft_tokens
    dear = tune(record, replace(COSTS, head=5.0), unseen)
    assert dear.options == {
        "speculate": True,
        "drafter": "ngram:size=4,max_tokens=4",
        "costs": dear.options["costs"],
    }


def test_dear_heads_and_rows_switch_drafting_off() -> None:
    record = recorded("translator").record
    dear = replace(COSTS, head=5.0, layers=tuple(1.0 + 5.0 * row for row in range(ROWS)))
    found = tune(record, dear, unseen)
    assert found.options == {"speculate": False}
    assert found.sentence().startswith("plain decoding is faster here")
