"""The HTML page as text: what it holds, what it refuses. test_page_browser.py opens it."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import selfspec
from selfspec.api.givers import Giver
from selfspec.config import SpeculationOptions
from selfspec.decoding.stats import Round
from selfspec.eval import replay
from selfspec.eval.record import NONE, Record
from selfspec.options import CONTROLLERS, Costs, Exit, Ngram
from selfspec.visualise.layers import rejected
from selfspec.visualise.look import branches, inspect
from selfspec.visualise.page import grid, page_data, render
from tests.api.test_default_model import pytestmark as default_model
from tests.models import CHEAP
from tests.records import recorded
from tests.traces import USED, alone, make_trace, some_costs, text_of, tiled


@pytest.fixture(scope="module")
def record() -> Record:
    return alone(recorded("translator").record)


def settings(record: Record) -> Iterator[SpeculationOptions]:
    """Every drafter, trees where the record has them; so dear that some pause."""
    every = record.info.exit_layers
    shapes = [(every, 1), (every[:1], 1), *([((0,), 5)] if record.guesses.size else [])]
    for drafter, (layers, guesses), most, never_slower in itertools.product(
        ("ngram", "exit", "ngram+exit", "none"), shapes, (1, 3, 4), (False, True)
    ):
        yield SpeculationOptions(
            drafter=drafter,
            exit=Exit(
                layers=layers,
                threshold=0.3,
                anneal_strength=0.5,
                max_tokens=most,
                guesses=guesses,
                max_rows=9,
            ),
            ngram=Ngram(max_tokens=most + 2),
            costs=Costs(row=(0.05, 0.9), head=0.34),
            never_slower=never_slower,
        )


def embedded(page: str) -> dict:
    """The page's data, cut out as a browser does: up to the first closing tag."""
    start = page.index('<script type="application/json" id="data">')
    text = page[page.index(">", start) + 1 :]
    return json.loads(text[: text.lower().index("</script")])


def test_texts_of_tokens_cannot_leave_their_element_and_nothing_is_loaded(record: Record) -> None:
    page = render(make_trace(record, USED), record, None)
    data = embedded(page)
    assert "</script>" in [text for _, text in data["words"]]
    assert "Say &lt;/script&gt; and &lt;script&gt;hacked = 1&lt;/script&gt;.</p>" in page
    assert len(re.findall(r"<script", page)) == 2
    assert "<title>Say &lt;/script&gt; and" in page
    assert "default-src 'none'" in page
    assert re.search("https?://", page) is None


def test_without_a_record_there_are_no_other_settings(record: Record) -> None:
    trace = make_trace(record, USED)
    assert embedded(render(trace, None, None))["grid"] is None
    lossy = replace(trace, info=replace(trace.info, lossless=False))
    assert embedded(render(lossy, record, None))["grid"] is None


@pytest.mark.parametrize("kind", ["translator", "deep-fused", "deep-fused-0"])
def test_controls_begin_at_the_decode_whatever_drafted(kind: str) -> None:
    record = alone(recorded(kind).record)
    for options in settings(record):
        trace = make_trace(record, options)
        found = grid(trace, record)
        assert found.notes == []
        assert replay.rounds(record, 0, found.begin) == list(trace.rounds)
        at = 0
        for axis in found.of(found.begin.drafter):
            at = at * len(axis.values) + axis.own
        begun = list(found.points(found.begin.drafter))[at]
        assert replay.rounds(record, 0, begun) == list(trace.rounds)


@pytest.mark.parametrize("kind", ["translator", "deep-fused", "deep-fused-0"])
def test_every_point_holds_the_rounds_of_its_setting(kind: str) -> None:
    record = alone(recorded(kind).record)
    trace = make_trace(record, USED)
    costs = some_costs(record.info.num_layers, 16)
    data, found = page_data(trace, record, costs, text_of), grid(trace, record)
    seen = set()
    for drafter, points in data["grid"]["points"].items():
        for options, point in zip(found.points(drafter), points, strict=True):
            rounds, shown = replay.rounds(record, 0, options), data["grid"]["results"][point]
            told = [data["rounds"][index] for index in shown["rounds"]]
            given = [[data["givers"][giver]["words"] for giver in one[0]] for one in told]
            assert given == [[Giver(*giver).words for giver in e.givers] for e in rounds]
            assert [one[1] for one in told] == [vain(entry) for entry in rounds]
            assert sum(sum(one[-2:]) for one in told) == pytest.approx(costs.seconds_of(rounds))
            tokens, drafted = len(record.answers) - 1, sum(len(e.draft_tokens) for e in rounds)
            kept = sum(entry.accepted for entry in rounds)
            passes = (one for entry in rounds[1:] for one in entry.passes)
            assert shown["counts"] == {
                "rounds": len(rounds) - 1,
                "cr": tokens / (len(rounds) - 1),
                "drafted": drafted,
                "accepted": kept,
                "acceptance": pytest.approx(100 * kept / drafted if drafted else 0),
                "work": sum(rows * (last - first) for rows, first, last in passes) / tokens,
                "speed": pytest.approx(tokens * costs.plain_step() / costs.seconds_of(rounds)),
            }
            seen.add(point)
    assert len(seen) == len(data["grid"]["results"]) > 10


def vain(entry: Round) -> tuple:
    """What was rejected: in front of which token, its text, and where its first draft left."""
    return tuple(
        (
            at,
            "".join(text_of(entry.draft_tokens[draft]) for draft in branch),
            entry.exit_layers[branch[0]] if entry.sources[branch[0]] == "exit" else None,
        )
        for at, branch in rejected(entry)
    )


def test_every_control_has_another_stop_that_changes_the_rounds() -> None:
    record = tiled(alone(recorded("deep-fused").record), 60)
    used = replace(USED, costs=Costs(head=0.5))  # dear enough for pauses
    data = page_data(make_trace(record, used), record, None)["grid"]
    for drafter, points in data["points"].items():
        axes = [axis for axis in data["axes"] if drafter in axis["drafters"]]
        results = np.array(points).reshape([len(axis["values"]) for axis in axes])
        for number, axis in enumerate(axes):
            moved = np.moveaxis(results, number, 0)
            assert (moved != moved[axis["own"]]).any(), (drafter, axis["name"])


def test_without_heads_text_already_seen_alone_is_shown(record: Record) -> None:
    nothing, chances = np.zeros((0, 0), np.int32), np.zeros((0, 3, 0), np.float32)
    record = replace(
        record,
        info=replace(record.info, exit_layers=()),
        roots=np.full_like(record.roots, NONE),
        tokens=nothing,
        children=nothing,
        guesses=nothing,
        behind=nothing,
        confidence=chances.reshape(0, 0, 3),
        chances=chances,
    )
    trace = make_trace(record, SpeculationOptions(drafter="ngram"))
    found = grid(trace, record)
    assert (found.notes, found.drafters) == ([], ("ngram", "none"))
    assert [axis.name for axis in found.axes] == ["ngram-width"]
    assert replay.rounds(record, 0, found.begin) == list(trace.rounds)


@pytest.mark.parametrize("heads", [pytest.param("smollm2-135m-instruct", marks=default_model)])
def test_the_controls_of_the_default_model_begin_at_the_decode(heads: str) -> None:
    """Trees around prompt lookup, under the never-slower rule: what the default drafts by."""
    speculator, tokens = selfspec.load(heads=heads, costs=CHEAP), 40
    question = "Write a line of thanks to Ann Miller of Miller & Son, then write it again."
    trace = inspect(speculator, question, all_layers=False, max_new_tokens=tokens)
    record = branches(speculator, question, tokens, trace.info.options)
    found = grid(trace, record)
    assert found.notes == []
    assert replay.rounds(record, 0, found.begin)[1:] == list(trace.rounds[1:])
    assert {source for entry in trace.rounds for source in entry.sources} == {"exit", "ngram"}


def test_rounds_that_no_setting_makes_are_noticed(record: Record) -> None:
    trace = make_trace(record, USED)
    others = make_trace(record, USED.updated({"exit": {"threshold": 0.9}})).rounds
    (note,) = grid(replace(trace, rounds=others), record).notes
    assert "decoded in other rounds than these settings make here" in note


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"drafter": "ngram+draft-model"}, "decoded with drafter ngram+draft-model, the nearest"),
        ({"controller": CONTROLLERS["gammatune"]()}, "decoded with controller gammatune"),
        ({"exit": {"layers": (1, 4), "threshold": (0.3, 0.3)}}, "layers=1,threshold=0.3"),
        ({"exit": {"threshold": (0.3, 0.01, 0.3)}}, "threshold=0.3/0.15/0.3"),
        ({"exit": {"anneal_strength": 0.6}}, "anneal_strength=0.5"),
        ({"exit": {"max_tokens": 9}}, "max_tokens=4"),
        ({"exit": {"guesses": 3}}, "guesses=3"),
    ],
)
def test_what_cannot_be_replayed_is_said(
    record: Record, changes: dict[str, Any], note: str
) -> None:
    trace = make_trace(record, USED)
    options = trace.info.options
    exits = replace(options.exit, **changes.pop("exit", {}))
    options = replace(options, exit=exits, **changes)
    found = grid(replace(trace, info=replace(trace.info, options=options)), record)
    assert len(found.notes) == 1
    assert note in found.notes[0]
    for drafter in found.drafters:
        for options in found.points(drafter):
            replay.rounds(record, 0, options)  # raises for what was not recorded
