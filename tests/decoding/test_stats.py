"""Counters of a generation, on rounds worked by hand and a clock that the test moves."""

from __future__ import annotations

import json

import pytest

from selfspec.decoding.stats import PARTS, GenerationStats, Stopwatch
from tests.traces import entry

PREFILL = entry(1, prefill=True, ended="off")
ALL_ACCEPTED = entry(4, [2, 4, 2], 3)
ONE_REJECTED = entry(2, [4, 2], 1, ended="depth")
SEEN = entry(2, [0] * 3, 1, sources=["ngram"] * 3, ended="off")
STOPPED = entry(2, [4, 4], 2, ended="eos", stop_reason="eos")


@pytest.fixture
def stats() -> GenerationStats:
    stats = GenerationStats(num_layers=8, prompt_tokens=5)
    for part in (PREFILL, ALL_ACCEPTED, ONE_REJECTED, SEEN, STOPPED):
        stats.add(part)
    return stats


def test_a_lap_is_charged_to_its_part_and_the_callers_time_to_nobody() -> None:
    seconds = iter([100.0, 160.0, 162.0, 162.5, 163.5])
    watch = Stopwatch(lambda: next(seconds))
    watch.start()
    for part in ("draft", "verify", "draft"):
        watch.lap(part)
    assert watch.seconds == {"draft": 3.0, "verify": 0.5}


def test_without_rounds_or_time_all_rates_are_zero() -> None:
    stats = GenerationStats(num_layers=8)
    rates = (stats.acceptance_rate, stats.compression_rate, stats.decode_tokens_per_s)
    assert rates == (0.0, 0.0, 0.0)


def test_the_line_for_people(stats: GenerationStats) -> None:
    stats.seconds.update({"prefill": 0.013, "verify": 4.0})
    lossy = GenerationStats(num_layers=8, lossless=False)
    assert lossy.line() == GenerationStats(num_layers=8).line() + "; lossy"
    assert GenerationStats(num_layers=8, pinned=True).line().endswith("; pinned")
    assert stats.line() == (
        "11 tokens at 2.5 tokens/s, first after 13 ms; 4 rounds, 2.50 tokens per pass; 7 of 10 "
        "drafts accepted (exit layer 2: 2 of 3, exit layer 4: 4 of 4, prompt lookup: 1 of 3)"
    )
    assert stats.summary() == "11 tokens at 2.5 tokens/s, 2.5 tokens per pass"
    one = GenerationStats(num_layers=8, new_tokens=1, rounds=1)
    assert one.summary() == "1 token, 0.0 tokens per pass"
    assert one.line().startswith("1 token at 0.0 tokens/s, first after 0 ms; 1 round, 0.00 tokens ")


def test_the_dict_survives_json(stats: GenerationStats) -> None:
    parts = {"prefill": 0.5, "draft": 1.0, "heads": 0.25, "verify": 2.0, "bookkeeping": 0.75}
    assert tuple(parts) == PARTS
    stats.seconds.update(parts)
    values = json.loads(json.dumps(stats.to_dict()))
    assert values == {
        "num_layers": 8,
        "prompt_tokens": 5,
        "reused_tokens": 0,
        "lossless": True,
        "pinned": False,
        "drafts_refused": None,
        "new_tokens": 11,
        "rounds": 4,
        "drafted": 10,
        "accepted": 7,
        "bonus": 3,
        "drafted_by_source": {"exit": 7, "ngram": 3},
        "accepted_by_source": {"exit": 6, "ngram": 1},
        "drafted_by_layer": {"2": 3, "4": 4},
        "accepted_by_layer": {"2": 2, "4": 4},
        "drafted_by_index": {"1": 4, "2": 4, "3": 2},
        "accepted_by_index": {"1": 4, "2": 2, "3": 1},
        "accepted_lengths": {"3": 1, "1": 2, "2": 1},
        "ended": {"width": 1, "depth": 1, "off": 1, "eos": 1},
        "seconds": parts,
        "stop_reason": "eos",
        "acceptance_rate": 0.7,
        "compression_rate": 2.5,
        "ttft_s": 0.5,
        "decode_s": 4.0,
        "decode_tokens_per_s": 2.5,
    }
