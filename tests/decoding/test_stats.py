"""Counters of a generation, on rounds worked by hand and a clock that the test moves."""

from __future__ import annotations

import json
from typing import Any

import pytest

from selfspec.decoding.stats import PARTS, GenerationStats, Round, Stopwatch


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


def entry(**values: Any) -> Round:
    """A Round; what is not given is empty."""
    empty: dict[str, Any] = {
        "tokens": [],
        "draft_tokens": [],
        "exit_layers": [],
        "sources": ["exit"] * len(values.get("draft_tokens", [])),
        "kept": [*range(values.pop("accepted", 0))],
        "ended": "off",
    }
    return Round(**empty | values)


PREFILL = entry(tokens=[7], prefill=True, passes=[(5, 0, 8)])

ALL_ACCEPTED = entry(
    tokens=[1, 2, 3, 4],
    draft_tokens=[1, 2, 3],
    exit_layers=[2, 4, 2],
    accepted=3,
    ended="width",
    passes=[(1, 0, 2), (1, 0, 2), (2, 2, 4), (2, 0, 2), (2, 2, 4), (4, 4, 8)],
)

ONE_REJECTED = entry(
    tokens=[5, 9],
    draft_tokens=[5, 6],
    exit_layers=[4, 2],
    accepted=1,
    ended="depth",
    passes=[(1, 0, 4), (2, 0, 8)],
)

STOPPED = entry(
    tokens=[8, 0],
    draft_tokens=[8, 0],
    exit_layers=[4, 4],
    accepted=2,
    ended="eos",
    passes=[(3, 0, 8)],
    stop_reason="eos",
)


@pytest.fixture
def stats() -> GenerationStats:
    """After the prompt's pass and three rounds."""
    stats = GenerationStats(num_layers=8, prompt_tokens=5)
    for part in (PREFILL, ALL_ACCEPTED, ONE_REJECTED, STOPPED):
        stats.add(part)
    return stats


def test_a_lap_is_charged_to_its_part(clock: Clock) -> None:
    watch = Stopwatch(clock)
    clock.seconds += 2.0
    watch.lap("draft")
    clock.seconds += 0.5
    watch.lap("verify")
    clock.seconds += 1.0
    watch.lap("draft")
    assert watch.seconds == {"draft": 3.0, "verify": 0.5}


def test_time_that_the_caller_had_is_charged_to_nobody(clock: Clock) -> None:
    watch = Stopwatch(clock)
    clock.seconds += 60.0
    watch.start()
    clock.seconds += 1.0
    watch.lap("draft")
    assert watch.seconds == {"draft": 1.0}


def test_totals_of_three_rounds(stats: GenerationStats) -> None:
    assert (stats.new_tokens, stats.rounds) == (9, 3)
    assert (stats.drafted, stats.accepted, stats.bonus) == (7, 6, 2)
    assert stats.stop_reason == "eos"


def test_the_prompts_pass_is_no_verification() -> None:
    stats = GenerationStats(num_layers=8, prompt_tokens=5)
    stats.add(PREFILL)
    assert (stats.rounds, stats.bonus, stats.compression_rate) == (0, 0, 0.0)
    assert (stats.new_tokens, stats.row_layers) == (1, 40)
    assert stats.ended == {}
    assert stats.accepted_lengths == {}


def test_rates_of_three_rounds(stats: GenerationStats) -> None:
    assert stats.acceptance_rate == 6 / 7
    assert stats.compression_rate == 8 / 3


def test_compression_is_one_plus_accepted_per_round_unless_the_text_ends_in_a_draft() -> None:
    stats = GenerationStats(num_layers=8)
    stats.add(ALL_ACCEPTED)
    stats.add(ONE_REJECTED)
    assert stats.compression_rate == 1 + stats.accepted / stats.rounds == 3.0


def test_drafts_by_exit_layer(stats: GenerationStats) -> None:
    # layers of the drafts: 2 4 2 | 4 2 | 4 4; of the second round only the first was kept
    assert stats.drafted_by_layer == {2: 3, 4: 4}
    assert stats.accepted_by_layer == {2: 2, 4: 4}


def test_drafts_by_place_in_their_round(stats: GenerationStats) -> None:
    assert stats.drafted_by_index == {1: 3, 2: 3, 3: 1}
    assert stats.accepted_by_index == {1: 3, 2: 2, 3: 1}


def test_rounds_by_length_and_by_why_drafting_ended(stats: GenerationStats) -> None:
    assert stats.accepted_lengths == {3: 1, 1: 1, 2: 1}
    assert stats.ended == {"width": 1, "depth": 1, "eos": 1}


def test_row_layers_multiply_rows_by_layers_of_every_pass(stats: GenerationStats) -> None:
    prompt = 5 * 8
    first = 1 * 2 + 1 * 2 + 2 * 2 + 2 * 2 + 2 * 2 + 4 * 4
    second = 1 * 4 + 2 * 8
    third = 3 * 8
    assert stats.row_layers == prompt + first + second + third


def test_times_split_at_the_first_token(stats: GenerationStats) -> None:
    parts = {"prefill": 0.5, "draft": 1.0, "heads": 0.25, "verify": 2.0, "bookkeeping": 0.75}
    assert tuple(parts) == PARTS
    stats.seconds.update(parts)
    assert stats.ttft_s == 0.5
    assert stats.decode_s == 4.0
    assert stats.decode_tokens_per_s == 8 / 4.0


def test_without_rounds_or_time_all_rates_are_zero() -> None:
    stats = GenerationStats(num_layers=8)
    rates = (stats.acceptance_rate, stats.compression_rate, stats.decode_tokens_per_s)
    assert rates == (0.0, 0.0, 0.0)


def test_the_line_for_people(stats: GenerationStats) -> None:
    stats.seconds.update({"prefill": 0.013, "verify": 4.0})
    assert stats.line() == (
        "9 tokens, 2.0 tok/s, first after 13 ms | 3 rounds, CR 2.67, "
        "6/7 drafts accepted (2/3 at 2, 4/4 at 4)"
    )


def test_drafts_that_ran_through_no_layer_are_counted_by_who_made_them() -> None:
    stats = GenerationStats(num_layers=8)
    stats.add(ALL_ACCEPTED)
    seen = entry(
        tokens=[5, 6],
        draft_tokens=[5, 7, 7],
        exit_layers=[0] * 3,
        sources=["ngram"] * 3,
        accepted=1,
    )
    stats.add(seen)
    assert stats.drafted_by_source == {"exit": 3, "ngram": 3}
    assert stats.accepted_by_source == {"exit": 3, "ngram": 1}
    assert stats.drafted_by_layer == {2: 2, 4: 1}
    assert "4/6 drafts accepted (2/2 at 2, 1/1 at 4, 1/3 by ngram)" in stats.line()


def test_a_lossy_rule_is_named_in_the_line() -> None:
    assert GenerationStats(num_layers=8, lossless=False).line().endswith(" | lossy")
    assert GenerationStats(num_layers=8, pinned=True).line().endswith(" | pinned")
    assert "lossy" not in GenerationStats(num_layers=8).line()


def test_the_dict_survives_json(stats: GenerationStats) -> None:
    stats.seconds.update({"prefill": 0.5, "draft": 4.0})
    values = json.loads(json.dumps(stats.to_dict()))
    assert values == {
        "num_layers": 8,
        "prompt_tokens": 5,
        "reused_tokens": 0,
        "lossless": True,
        "pinned": False,
        "drafts_refused": None,
        "new_tokens": 9,
        "rounds": 3,
        "drafted": 7,
        "accepted": 6,
        "bonus": 2,
        "drafted_by_source": {"exit": 7},
        "accepted_by_source": {"exit": 6},
        "drafted_by_layer": {"2": 3, "4": 4},
        "accepted_by_layer": {"2": 2, "4": 4},
        "drafted_by_index": {"1": 3, "2": 3, "3": 1},
        "accepted_by_index": {"1": 3, "2": 2, "3": 1},
        "accepted_lengths": {"3": 1, "1": 1, "2": 1},
        "ended": {"width": 1, "depth": 1, "eos": 1},
        "row_layers": 116,
        "seconds": {"prefill": 0.5, "draft": 4.0},
        "stop_reason": "eos",
        "acceptance_rate": 6 / 7,
        "compression_rate": 8 / 3,
        "ttft_s": 0.5,
        "decode_s": 4.0,
        "decode_tokens_per_s": 2.0,
    }
