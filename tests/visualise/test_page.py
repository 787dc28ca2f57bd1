"""The HTML page as text: what it holds. test_page_browser.py opens it."""

from __future__ import annotations

import json
import re

import pytest

from selfspec.api.givers import Giver
from selfspec.decoding.stats import Round
from selfspec.visualise.layers import rejected
from selfspec.visualise.page import page_data, render
from tests.records import recorded
from tests.traces import alone, make_trace, some_costs, text_of


def embedded(page: str) -> dict:
    """The page's data, cut out as a browser does: up to the first closing tag."""
    start = page.index('<script type="application/json" id="data">')
    text = page[page.index(">", start) + 1 :]
    return json.loads(text[: text.lower().index("</script")])


def test_texts_of_tokens_cannot_leave_their_element_and_nothing_is_loaded() -> None:
    page = render(make_trace(alone(recorded("translator").record)), None)
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
    trace, costs = make_trace(record), some_costs(record.num_layers, 16)
    data = page_data(trace, costs)
    told = data["rounds"]
    given = [[data["givers"][giver]["words"] for giver in one[0]] for one in told]
    assert given == [[Giver(*giver).words for giver in e.givers] for e in trace.rounds]
    assert [one[1] for one in told] == [vain(entry) for entry in trace.rounds]
    assert sum(sum(one[-2:]) for one in told) == pytest.approx(costs.seconds_of(trace.rounds))
    assert [sum(one[-2:]) for one in page_data(trace, None)["rounds"]] == [
        0,
        *[1] * (len(told) - 1),
    ]


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
