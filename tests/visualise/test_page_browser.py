"""The HTML page in a real browser: it shows the trace's figures, in any theme and size.

It must write nothing to the console and load nothing.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from selfspec.eval import report
from selfspec.visualise.layers import LayerTrace, gain, rejections, visible
from selfspec.visualise.views import render
from tests.browsers import (  # noqa: F401  # fixtures
    Browser,
    Open,
    Page,
    axe_findings,
    browser_fixture,
    expect,
    opened_fixture,
)
from tests.traces import drawn_trace

PHONE: dict[str, Any] = {"viewport": {"width": 360, "height": 740}}


@pytest.fixture(scope="module")
def trace() -> LayerTrace:
    return drawn_trace()


@pytest.fixture
def unfolded(opened: Open, tmp_path: Path) -> Open:
    """A function `(html, **context)` that opens the page from a file and unfolds its table."""

    def show(html: str, **options: Any) -> Page:
        file = tmp_path / "page.html"
        file.write_text(html, encoding="utf-8")
        page = opened(file.as_uri(), **options)
        page.locator("#guesses > summary").click()
        page.locator("#map td").first.wait_for(state="attached")
        return page

    return show


@pytest.fixture
def page(unfolded: Open, trace: LayerTrace) -> Page:
    return unfolded(render(trace))


def cell(page: Page, trace: LayerTrace, place: int, layer: int) -> Any:
    """A cell of the map, whose rows run from the deepest layer down to the first."""
    row = len(trace.info.exit_layers) - 1 - trace.info.exit_layers.index(layer)
    return page.locator("#map tbody tr").nth(row).locator("td").nth(place)


def test_hover_shows_the_numbers_of_the_trace(page: Page, trace: LayerTrace) -> None:
    for place, layer in ((0, 1), (3, 5), (7, 2), (len(trace.places) - 1, 3)):
        says = trace.places[place].layers[trace.info.exit_layers.index(layer)]
        shown = cell(page, trace, place, layer)
        assert shown.inner_text() == visible(says.top_texts[0])
        shown.hover()
        bars, fields = page.locator("#readout .bars tr"), ("confidence", "rank", "KL")
        assert bars.locator(".token").all_text_contents() == [*map(visible, says.top_texts)]
        probs = [f"{prob:.4f}" for prob in says.top_probs]
        assert bars.locator(".number").all_text_contents() == probs
        assert [page.locator(f"#readout [data-field={key}]").inner_text() for key in fields] == [
            f"{says.confidence:.3f}",
            str(says.rank or "–"),
            "∞" if says.divergence == float("inf") else f"{says.divergence:.3f}",
        ]


def test_cells_have_the_right_frames_and_marks(page: Page, trace: LayerTrace) -> None:
    marks = set[str]()
    for place in trace.places:
        entry = trace.rounds[place.round]
        offset = place.index - sum(len(past.tokens) for past in trace.rounds[: place.round])
        vain = {entry.exit_layers[branch[0]] for at, branch in rejections(entry) if at == offset}
        for says in place.layers:
            classes = set(cell(page, trace, place.index, says.layer).get_attribute("class").split())
            expected = {"right" if says.top_tokens[0] == place.token else "other"}
            if place.exit_layer == says.layer:
                expected.add("left")
            elif says.layer in vain:
                expected.add("rejected")
            assert classes == expected
            marks |= classes
    assert marks == {"right", "other", "left", "rejected"}


def test_hostile_text_stays_text(page: Page, trace: LayerTrace) -> None:
    answer = page.locator("#answer").text_content()
    assert answer == "".join(place.text for place in trace.places)
    assert page.locator("#prompt").text_content() == trace.info.prompt
    assert page.title().startswith(trace.info.prompt)
    assert page.evaluate("typeof hacked") == "undefined"
    assert page.locator("img").count() == 0
    text = "".join(page.locator("#map td").all_text_contents())
    assert "<script>" in text
    assert "</script>" in text
    page.get_by_label("words").uncheck()
    assert not page.locator("#map td span").first.is_visible()


def test_arrow_keys_move_over_tokens_and_cells(page: Page, trace: LayerTrace) -> None:
    heading = page.locator("#readout h3")
    first = next(place.index for place in trace.places if place.kind == "accepted")
    assert f"token {first + 1} · whole model" in heading.inner_text()  # selected at the start
    page.locator("#answer [tabindex='0']").focus()
    page.keyboard.press("ArrowRight")
    assert "token 2 · whole model" in heading.inner_text()
    page.keyboard.press("End")
    assert f"token {len(trace.places)} ·" in heading.inner_text()
    page.locator("#map [tabindex='0']").focus()
    assert "token 1 · whole model" in heading.inner_text()
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
        page.keyboard.press(key)
    deepest = trace.info.exit_layers[-1]
    assert f"token 3 · layer {deepest}" in heading.inner_text()
    focused = page.evaluate(
        "[document.activeElement.getAttribute('aria-label'), "
        "getComputedStyle(document.activeElement).outlineStyle]"
    )
    assert focused[0].startswith(f"layer {deepest} says")
    assert focused[1] == "solid"


def test_the_race_follows_the_costs(page: Page, trace: LayerTrace) -> None:
    draft_gain = gain(trace)
    assert page.locator("h1").inner_text() == draft_gain.headline
    plain = draft_gain.tokens - 1
    steps = plain / trace.cost.gain(trace.rounds)
    words = f"With drafts {steps:.1f} steps, plain decoding {plain:.1f} steps"
    assert page.locator("#lanes-hint").inner_text().startswith(words)
    slider = page.get_by_role("slider", name="time")
    slider.evaluate("node => { node.value = 500; node.dispatchEvent(new Event('input')); }")
    count = int(max(steps, plain) / 2 + 1e-6) + 1
    text = "".join(place.text for place in trace.places[:count])
    spans = page.locator("#plain-text span:not([hidden])")
    assert "".join(spans.all_text_contents()) == text
    page.get_by_role("button", name="play the race").click()
    full = f"{len(trace.places)} of {len(trace.places)}"
    expect(page.locator("#plain-count")).to_have_text(full)
    expect(page.get_by_role("button", name="play the race")).to_be_visible()


def test_copied_tokens_show_their_place_in_the_prompt(unfolded: Open, trace: LayerTrace) -> None:
    rounds = tuple(
        replace(e, sources=["ngram"] * len(e.sources), exit_layers=[0] * len(e.exit_layers))
        for e in trace.rounds
    )
    places = tuple(
        replace(place, exit_layer=None, copied_from=2 if place.kind == "accepted" else None)
        for place in trace.places
    )
    page = unfolded(render(replace(trace, rounds=rounds, places=places)))
    accepted = next(place.index for place in places if place.kind == "accepted")
    piece = page.locator("#answer .piece").nth(accepted)
    assert "in the prompt: … p0 p1 [p2 ]p3" in (piece.get_attribute("title") or "")
    piece.hover()
    assert page.get_by_text("a draft of prompt lookup that was kept").is_visible()
    assert page.locator("#readout mark").inner_text() == "p2 "
    assert page.locator("#map td.left, #map td.rejected").count() == 0
    assert page.locator("#lanes .verify").count() == len(trace.rounds) - 1


@pytest.mark.parametrize(
    "look", [{}, {"color_scheme": "dark"}, PHONE], ids=["light", "dark", "phone"]
)
def test_axe_finds_nothing_and_the_page_fits_a_phone(
    unfolded: Open, trace: LayerTrace, look: dict[str, Any]
) -> None:
    page = unfolded(render(trace), **look)
    page.get_by_label("show rejected drafts").check()
    cell(page, trace, 0, 1).click()
    assert page.locator("#readout h3").is_visible()
    assert axe_findings(page) == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_report_of_wide_tables_fits_a_phone(browser: Browser, tmp_path: Path) -> None:
    runs = Path(__file__).parents[2] / "eval" / "results" / "bench-bf16-amx"
    file, page = tmp_path / "report.html", browser.new_page(**PHONE)
    file.write_text(report.page([report.read_results(runs)]), encoding="utf-8")
    page.goto(file.as_uri())
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_128_tokens_and_30_layers_stay_small() -> None:
    html = render(drawn_trace(128, 31, (4, 12, 20), range(1, 31)))
    assert len(html.encode("utf-8")) < 1_500_000
