"""The HTML page as text: what it holds, what it refuses. test_page_browser.py opens it."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest

import selfspec
from selfspec.config import SpeculationOptions
from selfspec.decoding.stats import Round
from selfspec.errors import InvalidData, InvalidOption
from selfspec.eval import replay
from selfspec.eval.record import NONE, Record
from selfspec.options import Exit, Prices
from selfspec.visualise.layers import LayerTrace
from selfspec.visualise.look import branches, inspect
from selfspec.visualise.page import Grid, grid, page_data, render
from tests.api.test_default_model import pytestmark as default_model
from tests.models import CHEAP
from tests.pages import learning_settings, tiled
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


def test_without_a_record_there_are_no_other_settings(record: Record) -> None:
    trace = make_trace(record, USED)
    assert embedded(render(trace, None, None))["grid"] is None
    lossy = replace(
        trace, info=replace(trace.info, settings=replace(trace.info.settings, lossless=False))
    )
    assert embedded(render(lossy, record, None))["grid"] is None


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


def around(trace: LayerTrace, record: Record) -> Grid:
    return grid(trace, record)


@pytest.mark.parametrize("kind", ["translator", "deep-fused", "deep-fused-0"])
def test_controls_begin_at_the_decode_whatever_drafted(kind: str) -> None:
    record = alone(recorded(kind).record, 1)
    for options in learning_settings(record):
        trace = make_trace(record, options)
        found = around(trace, record)
        assert found.notes == ()
        assert replay.rounds(record, 0, found.begin) == list(trace.rounds)
        at = 0
        for axis in found.of(found.begin.drafter):
            at = at * len(axis.values) + axis.own
        begun = list(found.points(found.begin.drafter))[at]
        assert replay.rounds(record, 0, begun) == list(trace.rounds)


@pytest.mark.parametrize("kind", ["translator", "deep-fused", "deep-fused-0"])
def test_every_point_holds_the_rounds_of_its_setting(kind: str) -> None:
    record = alone(recorded(kind).record, 1)
    trace = make_trace(record, USED)
    costs = some_costs(record.info.num_layers, 16)
    data, found = page_data(trace, record, costs), around(trace, record)
    seen = set()
    for drafter, points in data["grid"]["points"].items():
        for options, point in zip(found.points(drafter), points, strict=True):
            rounds, shown = replay.rounds(record, 0, options), data["grid"]["results"][point]
            assert [plain(data, index) for index in shown["rounds"]] == [
                (
                    len(entry.tokens),
                    entry.draft_tokens,
                    givers(entry),
                    entry.parents,
                    entry.kept,
                    entry.prefill,
                )
                for entry in rounds
            ]
            took = sum(sum(data["rounds"][index][-2:]) for index in shown["rounds"])
            tokens = len(record.answers) - 1
            assert took == pytest.approx(costs.seconds_of(rounds))
            assert shown["counts"] == {
                "rounds": len(rounds) - 1,
                "cr": tokens / (len(rounds) - 1),
                "drafted": sum(len(entry.draft_tokens) for entry in rounds),
                "accepted": sum(len(entry.kept) for entry in rounds),
                "acceptance": pytest.approx(100 * rate(rounds)),
                "work": pytest.approx(work(rounds[1:]) / tokens),
                "speed": pytest.approx(tokens * costs.plain_step() / costs.seconds_of(rounds)),
            }
            seen.add(point)
    assert len(seen) == len(data["grid"]["results"]) > 10


def givers(entry: Round) -> list[int | str]:
    each = zip(entry.sources, entry.exit_layers, strict=True)
    return [layer if source == "exit" else source for source, layer in each]


def plain(data: dict, index: int) -> tuple:
    """A round as the page holds it, with tokens in place of words, without times."""
    count, words, givers, parents, kept, prefill, *_ = json.loads(json.dumps(data["rounds"][index]))
    return count, [data["words"][word][0] for word in words], givers, parents, kept, prefill


def rate(rounds: list[Round]) -> float:
    drafted = sum(len(entry.draft_tokens) for entry in rounds)
    return sum(entry.accepted for entry in rounds) / drafted if drafted else 0.0


def work(rounds: list[Round]) -> int:
    return sum(rows * (last - first) for e in rounds for rows, first, last in e.passes)


def test_every_control_has_another_stop_that_changes_the_rounds() -> None:
    record = tiled(alone(recorded("deep-fused").record, 1), 60)
    used = replace(USED, prices=Prices(head=0.5))  # dear enough for pauses
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
    found = around(trace, record)
    assert (found.notes, found.drafters) == ((), ("ngram", "none"))
    assert [axis.name for axis in found.axes] == ["ngram-width"]
    assert replay.rounds(record, 0, found.begin) == list(trace.rounds)


@pytest.mark.parametrize("heads", [pytest.param("smollm2-135m-instruct", marks=default_model)])
def test_the_controls_of_the_default_model_begin_at_the_decode(heads: str) -> None:
    """Trees around text already seen, under the never-slower rule: what the default drafts by."""
    speculator, tokens = selfspec.load(heads=heads, prices=CHEAP), 40
    question = "Write a line of thanks to Ann Miller of Miller & Son, then write it again."
    trace = inspect(speculator, question, all_layers=False, max_new_tokens=tokens)
    record = branches(speculator, question, tokens, trace.info.settings)
    found = around(trace, record)
    assert found.notes == ()
    assert replay.rounds(record, 0, found.begin)[1:] == list(trace.rounds[1:])
    assert {source for entry in trace.rounds for source in entry.sources} == {"exit", "ngram"}


def test_rounds_that_no_setting_makes_are_noticed(record: Record) -> None:
    trace = make_trace(record, USED)
    others = make_trace(record, USED.updated({"exit": {"threshold": 0.9}})).rounds
    (note,) = around(replace(trace, rounds=others), record).notes
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
    found = around(replace(trace, info=replace(trace.info, settings=settings)), record)
    assert len(found.notes) == 1
    assert note in found.notes[0]
    for drafter in found.drafters:
        for options in found.points(drafter):
            replay.rounds(record, 0, options)  # raises for what was not recorded
