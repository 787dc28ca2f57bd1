"""The HTML page as text: what it holds, what it refuses. test_page_browser.py opens it."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from selfspec.config import SpeculationOptions
from selfspec.errors import InvalidData, InvalidOption
from selfspec.eval import replay
from selfspec.eval.record import Record
from selfspec.options import Exit
from selfspec.visualise.page import render
from selfspec.visualise.start import start
from tests.pages import learning_settings
from tests.records import recorded
from tests.traces import alone, make_trace, some_costs

USED = SpeculationOptions(
    exit=Exit(threshold=0.3, anneal_strength=0.5, max_tokens=3), never_slower=False
)


@pytest.fixture(scope="module")
def record() -> Record:
    return alone(recorded("translator").record, 1)


def embedded(page: str) -> dict:
    """The page's data, cut out as a browser does: up to the first closing tag."""
    start = page.index('<script type="application/json" id="data">')
    text = page[page.index(">", start) + 1 :]
    return json.loads(text[: text.lower().index("</script")])


def test_texts_of_tokens_cannot_leave_their_element(record: Record) -> None:
    page = render(make_trace(record, USED), record, None)
    data = embedded(page)
    assert "</script>" in [text for _, text in data["words"]]
    assert data["info"]["prompt"] == "Say </script> and <script>hacked = 1</script>."
    assert len(re.findall(r"<script", page)) == 2
    assert "<title>Say &lt;/script&gt; and" in page


def test_numbers_are_those_of_the_trace_to_float32(record: Record) -> None:
    trace = make_trace(record, USED)
    shown = embedded(render(trace, record, None))["places"]
    for place, found in zip(trace.places, shown, strict=True):
        for said, layer in zip(place.layers, found["layers"], strict=True):
            assert layer["rank"] == said.rank
            assert layer["sure"] == pytest.approx(said.confidence, rel=1e-8)
            assert layer["probs"] == pytest.approx(said.top_probs, abs=1e-6)


def test_the_page_may_load_nothing(record: Record) -> None:
    page = render(make_trace(record, USED), record, None)
    assert "default-src 'none'" in page
    links = {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert set(re.findall(r"https?://[^\"' ]+", page)) == links


def test_without_a_record_there_is_nothing_to_replay(record: Record) -> None:
    trace = make_trace(record, USED)
    assert embedded(render(trace, None, None))["record"] is None
    lossy = replace(
        trace, info=replace(trace.info, settings=replace(trace.info.settings, lossless=False))
    )
    assert embedded(render(lossy, record, None))["record"] is None


def test_a_record_of_another_answer_is_refused(record: Record) -> None:
    trace = make_trace(record, USED)
    other = alone(recorded("translator").record, 2)
    with pytest.raises(InvalidData, match="another answer"):
        render(trace, other, None)
    with pytest.raises(InvalidData, match="found 4 prompts"):
        render(trace, recorded("translator").record, None)


def test_costs_that_do_not_reach_are_refused(record: Record) -> None:
    trace, layers = make_trace(record, USED), record.info.num_layers
    with pytest.raises(InvalidOption, match="up to 7 rows, the record needs 6 layers and 8 rows"):
        render(trace, record, some_costs(layers, 7))
    with pytest.raises(InvalidOption, match="costs are of 7 layers"):
        render(trace, record, some_costs(7, 8))


def test_sliders_begin_at_the_settings_of_the_decode(record: Record) -> None:
    options = USED.updated({"drafter": "exit:layers=1/5,threshold=0.3125/0.7,max_depth=1"})
    trace = make_trace(record, options)
    begin = start(trace, record)
    assert begin.notes == ()
    assert begin.used == (True, False, False)  # 5 lies deeper than D_max = 1
    assert replay.rounds(record, 0, begin.options(record.info)) == list(trace.rounds)


@pytest.mark.parametrize("kind", ["translator", "deep-fused-0"])
def test_the_decode_is_where_sliders_begin_whatever_drafted(kind: str) -> None:
    record = alone(recorded(kind).record, 1)
    for options in learning_settings(record):
        trace = make_trace(record, options)
        begin = start(trace, record)
        assert begin.notes == ()
        assert replay.rounds(record, 0, begin.options(record.info)) == list(trace.rounds)


def test_rounds_that_no_setting_makes_are_noticed(record: Record) -> None:
    trace = make_trace(record, USED)
    others = make_trace(record, USED.updated({"exit": {"threshold": 0.9}})).rounds
    (note,) = start(replace(trace, rounds=others), record).notes
    assert "decoded in other rounds than these settings make here" in note


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"drafter": "ngram+draft-model"}, "decoded with drafts by ngram+draft-model"),
        ({"controller": "gammatune"}, "decoded with controller gammatune"),
        ({"exit_layers": (1, 4), "exit_thresholds": (0.3, 0.3)}, "exit layers not recorded: 4"),
        ({"exit_thresholds": (0.3, 0.01, 0.3)}, "tau was below 0.15"),
        ({"anneal_strength": 0.6}, "alpha was 0.6"),
        ({"max_draft_tokens": 9}, "W_max was 9, recorded were 4"),
        ({"guesses": 3}, "decoded with second guesses beside drafts"),
    ],
)
def test_what_cannot_be_replayed_is_said(record: Record, changes: dict, note: str) -> None:
    trace = make_trace(record, USED)
    settings = replace(trace.info.settings, **changes)
    begin = start(replace(trace, info=replace(trace.info, settings=settings)), record)
    assert len(begin.notes) == 1
    assert note in begin.notes[0]
    replay.Setting.of(record, begin.options(record.info))  # raises for what was not recorded
