"""A trace comes back from its file as it was; any other file is refused in one line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from selfspec.config import SpeculationOptions
from selfspec.errors import InvalidData
from selfspec.visualise.layers import LayerTrace, head_right, rejected, right_from, visible
from tests.traces import INFO, TOKEN, entry, long_trace, small_trace, trace_of


def saved(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    small_trace().save(path)
    return path


def test_a_file_gives_the_same_trace_back_and_every_line_says_what_it_is(tmp_path: Path) -> None:
    path = saved(tmp_path)
    assert LayerTrace.load(path) == small_trace()
    lines = [json.loads(line) for line in path.read_text().split("\n")[:-1]]
    assert [line["type"] for line in lines] == ["info", *["place"] * 6, *["round"] * 4]
    assert lines[0]["format_version"] == 6
    options = SpeculationOptions().updated(lines[0]["options"])
    assert options == INFO.options
    assert lines[9]["passes"] == [[1, 0, 2], [1, 2, 4], [3, 4, 6]]


def test_texts_may_hold_anything_that_ends_a_line_elsewhere(tmp_path: Path) -> None:
    found = long_trace(["\u2028", "\x85", '"\n\\', "\U0001f389"])
    found.save(tmp_path / "trace")
    assert LayerTrace.load(tmp_path / "trace") == found


@pytest.mark.parametrize(
    ("line", "old", "new", "reason"),
    [
        (1, '"format_version": 6', '"format_version": 5', "line 1: format version 5, this self"),
        (1, '"type": "info"', '"type": "place"', "line 1: found 'place', the first line must be"),
        (1, "threshold=0.5/0.8", "threshold=0.5/0.8/0.9", "line 1 is no line of a trace"),
        (1, "threshold=0.5/0.8", "tau=0.5", "line 1: unknown setting of exit: 'tau'"),
        (2, '"index": 0', '"index": 3', "line 2: place 3, expected 0"),
        (2, '"layer": 3', '"layer": 5', "line 2: exit layers [2, 5, 4] are not those of the"),
        (2, '"kind"', '"sort"', "unexpected keyword argument 'sort'"),
        (2, '"token": 7', '"token": 6', "rounds and places hold different tokens"),
        (3, "{", "", "line 3: it is not JSON"),
        (8, '"round"', '"turn"', "line 8: found 'turn', expected a place or a round"),
        (10, '"kept": [0]', '"kept": [2]', "drafts [2] were kept, of 2"),
        (10, '"parents": null', '"parents": [0, -1]', "parents [0, -1] are no tree of drafts"),
        (10, '["exit", "exit"]', '["exit"]', "a round of 2 drafts says more or"),
        (10, '" dropped"', "3", "line 10: draft_texts are no texts"),
    ],
)
def test_a_damaged_file_is_named_with_line_and_reason(
    tmp_path: Path, line: int, old: str, new: str, reason: str
) -> None:
    path = saved(tmp_path)
    lines = path.read_text().split("\n")
    assert old in lines[line - 1]
    lines[line - 1] = lines[line - 1].replace(old, new, 1)
    path.write_text("\n".join(lines))
    with pytest.raises(InvalidData) as caught:
        LayerTrace.load(path)
    assert str(caught.value).startswith(f"{path}")
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("keep", [0, 1, 5, 9])
def test_a_file_that_was_cut_off_is_refused(tmp_path: Path, keep: int) -> None:
    path = saved(tmp_path)
    path.write_text("\n".join(path.read_text().split("\n")[:keep]))
    with pytest.raises(InvalidData):
        LayerTrace.load(path)


# What layers knew, and what was rejected where


@pytest.mark.parametrize(
    ("right", "final", "stays", "head"),
    [
        ("..r", True, 4, 4),
        ("r.r", True, 4, 2),
        ("rrr", True, 2, 2),
        (".r.", True, 6, None),
        ("rrr", False, None, 2),
    ],
)
def test_layers_that_guess_the_token(
    right: str, final: bool, stays: int | None, head: int | None
) -> None:
    (place,) = long_trace(["a"]).places
    said = [
        replace(each, top_tokens=(TOKEN if mark == "r" else 0, 1))
        for each, mark in zip(place.layers, right, strict=True)
    ]
    place = replace(place, layers=tuple(said), final_top_tokens=(TOKEN if final else 0, 1))
    trace = long_trace(["a"])
    assert (right_from(trace, place), head_right(trace, place)) == (stays, head)


@pytest.mark.parametrize(
    ("parents", "kept", "branches"),
    [
        (None, [0], [(1, [1, 2, 3])]),
        (None, [], [(0, [0, 1, 2, 3])]),
        (None, [0, 1, 2, 3], []),
        ([-1, -1, 0, 2], [0, 2], [(0, [1]), (2, [3])]),
        ([-1, 0, 0, 1], [], [(0, [0, 1]), (0, [2]), (0, [3])]),
        ([-1, -1, 1, 1], [1, 3], [(0, [0]), (1, [2])]),
    ],
)
def test_rejected_drafts_stand_where_they_began(
    parents: list[int] | None, kept: list[int], branches: list[tuple[int, list[int]]]
) -> None:
    found = entry(len(kept) + 1, [0] * 4, kept=kept, parents=parents)
    assert rejected(found) == branches
    assert trace_of([found], ["a"] * 5, [("b",) * 4]).stats.accepted == len(kept)


@pytest.mark.parametrize(
    ("text", "shown"),
    [(" a\n", "␣a⏎"), ("", "∅"), ("\t\x1b", "⇥\\u001b"), ("\u2028", "\\u2028"), ("é你", "é你")],
)
def test_what_cannot_be_seen_is_shown(text: str, shown: str) -> None:
    assert visible(text) == shown
