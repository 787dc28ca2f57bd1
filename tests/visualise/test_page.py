"""The HTML page as text: what it holds. test_page_browser.py opens it."""

from __future__ import annotations

import json
import re

import pytest

from selfspec.visualise.layers import rejected
from selfspec.visualise.views import page_data, render
from tests.records import recorded
from tests.traces import USED, alone, make_trace, some_costs, text_of


def embedded(page: str) -> dict:
    """The page's data, cut out as a browser does: up to the first closing tag."""
    start = page.index('<script type="application/json" id="data">')
    text = page[page.index(">", start) + 1 :]
    return json.loads(text[: text.lower().index("</script")])


def test_texts_of_tokens_cannot_leave_their_element_and_nothing_is_loaded() -> None:
    page = render(make_trace(alone(recorded("translator").record), USED), None)
    data = embedded(page)
    assert "</script>" in [text for _, text in data["words"]]
    assert "Say &lt;/script&gt; and &lt;script&gt;hacked = 1&lt;/script&gt;.</p>" in page
    assert len(re.findall(r"<script", page)) == 2
    assert "<title>Say &lt;/script&gt; and" in page
    assert "default-src 'none'" in page
    assert re.search("https?://", page) is None


@pytest.mark.parametrize("kind", ["translator", "deep-fused-0"])
def test_rounds_say_who_gave_what_and_when(kind: str) -> None:
    record = alone(recorded(kind).record)
    trace, costs = make_trace(record, USED), some_costs(record.info.num_layers, 16)
    data = page_data(trace, costs)
    told = data["places"]
    given = [data["givers"][one["giver"]]["words"] for one in told]
    assert given == [giver.words for entry in trace.rounds for giver in entry.givers]
    branches = [branch["text"] for one in told for branch in one["rejected"]]
    assert sorted(branches) == sorted(
        "".join(text_of(entry.draft_tokens[draft]) for draft in branch)
        for entry in trace.rounds
        for _, branch in rejected(entry)
    )
    took = [sum(times) for _, *times in data["rounds"]]
    assert sum(took) == pytest.approx(costs.seconds_of(trace.rounds))
    plain = [sum(times) for _, *times in page_data(trace, None)["rounds"]]
    assert plain == [0, *[1] * (len(took) - 1)]
