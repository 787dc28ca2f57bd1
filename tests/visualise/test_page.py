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
from tests.records import OPTIONS, recorded
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
    with pytest.raises(InvalidOption, match="up to 4 rows, the record needs"):
        render(trace, record, some_costs(layers, OPTIONS.max_draft_tokens))
    with pytest.raises(InvalidOption, match="costs are of 7 layers"):
        render(trace, record, some_costs(7, OPTIONS.max_draft_tokens + 1))


def test_sliders_begin_at_the_settings_of_the_decode(record: Record) -> None:
    options = USED.updated({"drafter": "exit:layers=1/5,threshold=0.3125/0.7,max_depth=1"})
    trace = make_trace(record, options)
    begin = start(trace.info, record.info)
    assert begin.notes == ()
    assert begin.used == (True, False, False)  # 5 lies deeper than D_max = 1
    assert replay.rounds(record, 0, begin.options(record.info)) == list(trace.rounds)


def test_pauses_of_the_decode_are_not_replayed(record: Record) -> None:
    trace = make_trace(record, USED.updated({"never_slower": True, "prices": "head=9"}))
    assert any(entry.ended == "off" for entry in trace.rounds[1:])
    begin = start(trace.info, record.info, trace.rounds)
    assert begin.notes == ("decoded with pauses where drafts did not pay; here none are made",)


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"drafter": "ngram+exit"}, "decoded with drafts by ngram+exit"),
        ({"controller": "gammatune"}, "decoded with controller gammatune"),
        ({"exit_layers": (1, 4), "exit_thresholds": (0.3, 0.3)}, "exit layers not recorded: 4"),
        ({"exit_thresholds": (0.3, 0.01, 0.3)}, "tau was below 0.15"),
        ({"anneal_strength": 0.6}, "alpha was 0.6"),
        ({"max_draft_tokens": 9}, "W_max was 9, recorded were 4"),
        ({"drafter": "none", "exit_layers": (), "exit_thresholds": ()}, "drafts by none"),
    ],
)
def test_what_cannot_be_replayed_is_said(record: Record, changes: dict, note: str) -> None:
    info = make_trace(record, USED).info
    begin = start(replace(info, settings=replace(info.settings, **changes)), record.info)
    assert len(begin.notes) == 1
    assert note in begin.notes[0]
    replay.Setting.of(record, begin.options(record.info))  # raises for what was not recorded
