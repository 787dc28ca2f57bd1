"""The HTML page in a real browser: it shows the trace's numbers and replays what Python replays."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from selfspec.config import SpeculationOptions
from selfspec.eval import replay
from selfspec.eval.record import Record
from selfspec.options import Exit, Prices
from selfspec.visualise.gain import gain, right_from
from selfspec.visualise.layers import LayerTrace
from selfspec.visualise.page import render
from selfspec.visualise.texts import visible
from tests.browsers import Browser, Page, axe_findings, chromium, expect
from tests.pages import (
    COSTS,
    USED,
    as_choice,
    check_replayed,
    long_trace,
    many_settings,
    plain,
    python_results,
)
from tests.records import recorded
from tests.traces import alone, make_trace, some_costs

PROMPT = 1
PHONE: dict[str, Any] = {"viewport": {"width": 360, "height": 740}}

Open = Callable[..., Page]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def record() -> Record:
    return alone(recorded("translator").record, PROMPT)


@pytest.fixture(scope="module")
def trace(record: Record) -> LayerTrace:
    return make_trace(record, USED, [layer for layer in range(6) if layer != 4])


@pytest.fixture
def opened(browser: Browser, tmp_path: Path) -> Iterator[Open]:
    """`opened(html, **context)`: the page of a file. At the end: no message, and nothing loaded."""
    said: list[str] = []
    asked: list[str] = []
    contexts = []

    def open_page(html: str, **options: Any) -> Page:
        file = tmp_path / "page.html"
        file.write_text(html, encoding="utf-8")
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.set_default_timeout(10_000)
        page.goto(file.as_uri())
        page.wait_for_selector("html[data-ready]")
        asked.remove(file.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert said == []
    assert [url for url in asked if not url.startswith("data:")] == []


@pytest.fixture
def page(opened: Open, trace: LayerTrace, record: Record) -> Page:
    shown = opened(render(trace, record, COSTS))
    unfold(shown)
    return shown


def unfold(page: Page) -> None:
    """The table of guesses, and the sliders."""
    for name in ("guesses", "settings"):
        page.locator(f"#{name} > summary").click()
    page.locator("#map td").first.wait_for(state="attached")


def cell(page: Page, trace: LayerTrace, place: int, layer: int) -> Any:
    """A cell of the map; deep layers stand above."""
    row = len(trace.info.exit_layers) - 1 - trace.info.exit_layers.index(layer)
    return page.locator("#map tbody tr").nth(row).locator("td").nth(place)


def result(page: Page, name: str, column: str = "now") -> str:
    return page.locator(f"#results [data-{column}={name}]").inner_text()


def set_slider(page: Page, slider: Any, value: float) -> None:
    slider.evaluate(
        "(node, value) => { node.value = value; "
        "node.dispatchEvent(new Event('input', { bubbles: true })); }",
        value,
    )


def test_hover_shows_the_numbers_of_the_trace(page: Page, trace: LayerTrace) -> None:
    for place, layer in ((0, 1), (3, 5), (7, 2), (len(trace.places) - 1, 3)):
        says = trace.places[place].layers[trace.info.exit_layers.index(layer)]
        shown = cell(page, trace, place, layer)
        assert shown.inner_text() == visible(says.top_texts[0])
        shown.hover()
        readout = page.locator("#readout")
        rows = readout.locator(".bars tr").all()
        assert [row.locator(".token").text_content() for row in rows] == [
            visible(text) for text in says.top_texts
        ]
        assert [row.locator(".number").text_content() for row in rows] == [
            f"{prob:.4f}" for prob in says.top_probs
        ]
        values = {
            name: readout.locator(f"[data-field={name}]").inner_text()
            for name in ("confidence", "rank", "KL")
        }
        assert values == {
            "confidence": f"{says.confidence:.3f}",
            "rank": str(says.rank or "–"),
            "KL": "∞" if says.divergence == float("inf") else f"{says.divergence:.3f}",
        }


def test_frames_and_marks_are_where_they_belong(page: Page, trace: LayerTrace) -> None:
    left = rejected = 0
    for place in trace.places:
        entry = trace.rounds[place.round]
        bad = place.kind == "bonus" and entry.accepted < len(entry.draft_tokens)
        rejected_at = entry.exit_layers[entry.accepted] if bad else None
        for says in place.layers:
            classes = set(
                (cell(page, trace, place.index, says.layer).get_attribute("class")).split()
            )
            right = says.top_tokens[0] == place.token
            assert ("right" in classes) == right
            assert ("left" in classes) == (place.exit_layer == says.layer)
            assert ("rejected" in classes) == (rejected_at == says.layer)
            left += "left" in classes
            rejected += "rejected" in classes
    assert min(left, rejected) > 0


def test_text_is_text_whatever_it_says(page: Page, trace: LayerTrace) -> None:
    answer = page.locator("#answer").text_content()
    assert answer == "".join(place.text for place in trace.places)
    assert page.locator("#prompt").text_content() == trace.info.prompt
    assert page.title().startswith(trace.info.prompt)
    assert page.evaluate("typeof hacked") == "undefined"
    assert page.locator("img").count() == 0
    shown = "".join(page.locator("#map td").all_text_contents())
    assert "<script>" in shown
    assert "</script>" in shown


@pytest.mark.parametrize("kind", ["translator", "deep-fused"])
def test_the_page_replays_what_python_replays(opened: Open, kind: str) -> None:
    record = alone(recorded(kind).record, PROMPT)
    page = opened(render(make_trace(record, USED), record, COSTS))
    for setting in many_settings(record):
        choice = as_choice(record, setting)
        rounds = page.evaluate("choice => selfspec.replay(choice)", choice)
        summary = page.evaluate("choice => selfspec.summary(selfspec.replay(choice))", choice)
        check_replayed(record, setting, rounds, summary)


def test_the_replay_of_the_settings_used_is_the_decode(page: Page, trace: LayerTrace) -> None:
    rounds = page.evaluate("selfspec.replay(selfspec.data.start)")
    assert rounds == [plain(entry) for entry in trace.rounds]
    assert page.locator("#notes li").count() == 0


def test_sliders_give_the_counts_of_python(page: Page, record: Record) -> None:
    info, dice = record.info, random.Random(3)
    page.get_by_label("one τ for all layers").set_checked(False)
    used = python_results(record, USED.updated({"exit": {"layers": info.exit_layers}}))
    assert result(page, "rounds", "used") == str(used["rounds"])
    for _ in range(8):
        taus = []
        set_slider(page, page.locator("#depth-max"), len(info.exit_layers) - 1)
        for layer in info.exit_layers:
            slider = page.get_by_role("slider", name=f"tau, exit threshold of layer {layer}")
            set_slider(page, slider, dice.uniform(info.min_threshold, 0.8))
            taus.append(float(slider.input_value()))
        alpha, width = dice.randrange(len(info.anneal_strengths)), dice.randint(1, 4)
        depth = dice.randrange(len(info.exit_layers))
        for name, value in (("#alpha", alpha), ("#width", width), ("#depth-max", depth)):
            set_slider(page, page.locator(name), value)
        options = SpeculationOptions(
            exit=Exit(
                threshold=tuple(taus),
                anneal_strength=info.anneal_strengths[alpha],
                max_depth=info.exit_layers[depth],
                max_tokens=width,
            ),
            never_slower=False,
        )
        expected = python_results(record, options)
        assert result(page, "rounds") == str(expected["rounds"])
        assert result(page, "drafted") == str(expected["drafted"])
        assert result(page, "accepted") == str(expected["accepted"])
        assert result(page, "cr") == f"{expected['compression_rate']:.2f}"
        assert result(page, "speed") == f"{expected['speed_up']:.3f}"
        rounds = len(replay.rounds(record, 0, options)) - 1
        assert page.locator("#lanes .verify").count() == rounds
    page.locator("#controls .reset").click()
    assert result(page, "rounds") == str(used["rounds"])


def test_sliders_of_trees_begin_at_the_decode_and_give_the_counts_of_python(opened: Open) -> None:
    record = alone(recorded("deep-fused-0").record, PROMPT)
    options = SpeculationOptions(
        drafter="ngram+exit",
        exit=Exit(threshold=0.2, anneal_strength=0.5, max_tokens=3, guesses=4, max_rows=9),
        prices=Prices(row=0.02, head=0.1),
    )
    trace = make_trace(record, options)
    page = opened(render(trace, record, COSTS), **PHONE)
    assert page.evaluate("selfspec.replay(selfspec.data.start)") == [plain(e) for e in trace.rounds]
    unfold(page)
    assert page.locator("#notes li").count() == 0
    assert float(result(page, "speed")) == pytest.approx(gain(trace, COSTS).speed_up, abs=5e-4)
    painted = [page.locator(name).inner_html() for name in ("#answer", "#depth")]
    changes: list[tuple[str, Any, dict[str, Any]]] = [
        ("#per-place", 2, {"exit": {"guesses": 2}}),
        ("#rows", 4, {"exit": {"max_rows": 4}}),
        ("#ngram-width", 3, {"ngram": {"max_tokens": 3}}),
        ("#never-slower", False, {"never_slower": False}),
        ("#drafter", "exit", {"drafter": "exit"}),
        ("#per-place", 1, {"exit": {"guesses": 1}}),
        ("#drafter", "ngram", {"drafter": "ngram"}),
        ("#drafter", "none", {"drafter": "none"}),
    ]
    found = []
    for name, value, change in changes:
        control = page.locator(name)
        if isinstance(value, str):
            control.select_option(value)
        elif isinstance(value, bool):
            control.set_checked(value)
        else:
            set_slider(page, control, value)
        options = options.updated(change)
        expected = python_results(record, options)
        found.append(expected["drafted"])
        assert result(page, "rounds") == str(expected["rounds"])
        assert result(page, "drafted") == str(expected["drafted"])
        assert result(page, "speed") == f"{expected['speed_up']:.3f}"
        assert page.locator("#rows").is_visible() == (options.grows_trees)
        assert page.locator("#ngram-width").is_visible() == options.uses("ngram")
        assert page.locator("#never-slower").is_visible() == options.uses("exit")
    assert len(set(found)) > 4
    page.locator("#controls .reset").click()
    assert page.locator("#rows").input_value() == "9"
    after = [page.locator(name).inner_html() for name in ("#answer", "#depth")]
    assert [html.replace(' style=""', "") for html in after] == painted
    assert axe_findings(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_another_alpha_shades_by_recorded_confidence(
    page: Page, trace: LayerTrace, record: Record
) -> None:
    set_slider(page, page.get_by_label("α, annealing"), 2)
    place, column = 4, 1
    cell(page, trace, place, record.info.exit_layers[column]).hover()
    sure = record.confidence[record.roots[place - 1], column, 2]
    shown = page.locator("#readout [data-field=confidence]").inner_text()
    assert shown == f"{sure:.3f}"


def test_a_layer_can_be_switched_off(page: Page, record: Record) -> None:
    first, *others = record.info.exit_layers
    for layer in others:
        page.get_by_label(f"use exit layer {layer}").uncheck()
    expected = python_results(record, USED.updated({"exit": {"layers": (first,)}}))
    assert result(page, "rounds") == str(expected["rounds"])
    assert page.get_by_label(f"use exit layer {first}").is_disabled()  # one must stay


def test_one_threshold_can_move_all(page: Page, record: Record) -> None:
    layers = record.info.exit_layers
    set_slider(page, page.locator(f"[data-layer='{layers[0]}']"), 0.5)
    expected = python_results(record, USED.updated({"exit": {"threshold": 0.5}}))
    assert result(page, "rounds") == str(expected["rounds"])
    assert page.locator(f"[data-layer='{layers[-1]}']").input_value() == "0.5"


def test_keys_walk_over_tokens_and_cells(page: Page, trace: LayerTrace) -> None:
    heading = page.locator("#readout h3")
    page.locator("#depth [tabindex='0']").focus()
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


def test_bars_stand_where_guesses_stay_right(page: Page, trace: LayerTrace) -> None:
    shares = page.locator("#depth [role=option]").evaluate_all(
        "nodes => nodes.map(node => Number(node.style.getPropertyValue('--share')))"
    )
    layers = [right_from(trace, place) for place in trace.places]
    total = trace.info.num_layers
    assert shares == [(total if layer is None else layer) / total for layer in layers]
    assert len(set(layers)) > 2


def test_the_race_ends_as_the_costs_say(page: Page, trace: LayerTrace, record: Record) -> None:
    found = gain(trace, COSTS)
    assert page.locator("h1").inner_text() == found.headline
    seconds, plain = COSTS.seconds_of(trace.rounds), COSTS.plain_step() * (found.tokens - 1)
    words = f"With drafts {seconds:.2f} s, plain decoding {plain:.2f} s"
    assert page.locator("#lanes-hint").inner_text().startswith(words)
    set_slider(page, page.get_by_role("slider", name="time"), 500)
    there = int(max(seconds, plain) / 2 / COSTS.plain_step() + 1e-6) + 1
    shown = "".join(place.text for place in trace.places[:there])
    spans = page.locator("#plain-text span:not([hidden])")
    assert "".join(spans.all_text_contents()) == shown
    page.get_by_role("button", name="play the race").click()
    full = f"{len(trace.places)} of {len(trace.places)}"
    expect(page.locator("#plain-count")).to_have_text(full)
    expect(page.get_by_role("button", name="play the race")).to_be_visible()


def test_a_long_answer_is_paged(opened: Open, record: Record) -> None:
    trace, long = long_trace(record, 150)
    page = opened(render(trace, long, None))
    unfold(page)
    assert page.get_by_text("tokens 1–128 of 150").is_visible()
    assert page.get_by_text("no cost table").is_visible()
    page.locator("#map td").nth(127).click()  # the deepest layer's last one
    page.keyboard.press("ArrowRight")
    assert page.get_by_text("tokens 129–150 of 150").is_visible()
    assert "token 129 ·" in page.locator("#readout h3").inner_text()
    page.get_by_role("button", name="earlier").click()
    assert page.get_by_text("tokens 1–128 of 150").is_visible()


def test_copied_tokens_say_where_they_were_seen(opened: Open, trace: LayerTrace) -> None:
    rounds = tuple(
        replace(e, sources=["ngram"] * len(e.sources), exit_layers=[0] * len(e.exit_layers))
        for e in trace.rounds
    )
    places = tuple(
        replace(place, exit_layer=None, copied_from=2 if place.kind == "accepted" else None)
        for place in trace.places
    )
    page = opened(render(replace(trace, rounds=rounds, places=places), None, None))
    unfold(page)
    accepted = next(place.index for place in places if place.kind == "accepted")
    piece = page.locator("#answer .piece").nth(accepted)
    assert "in the prompt: … p0 p1 [p2 ]p3" in (piece.get_attribute("title") or "")
    piece.hover()
    assert page.get_by_text("a draft of text already seen that was kept").is_visible()
    assert page.locator("#readout mark").inner_text() == "p2 "
    assert page.locator("#map td.left, #map td.rejected").count() == 0


def test_it_comes_in_light_and_dark(opened: Open, trace: LayerTrace, record: Record) -> None:
    html = render(trace, record, COSTS)
    paper = "getComputedStyle(document.body).backgroundColor"
    light = opened(html, color_scheme="light").evaluate(paper)
    page = opened(html, color_scheme="dark")
    dark = page.evaluate(paper)
    assert light != dark
    page.get_by_role("button", name="dark").click()
    assert page.evaluate(paper) == light


@pytest.mark.parametrize(
    "look", [{}, {"color_scheme": "dark"}, PHONE], ids=["light", "dark", "phone"]
)
def test_axe_finds_nothing(
    opened: Open, trace: LayerTrace, record: Record, look: dict[str, Any]
) -> None:
    page = opened(render(trace, record, COSTS), **look)
    unfold(page)
    page.get_by_label("show rejected drafts").check()
    page.locator("#depth [role=option]").nth(2).click()
    assert axe_findings(page) == []


def test_it_fits_a_phone(opened: Open, trace: LayerTrace, record: Record) -> None:
    page = opened(render(trace, record, COSTS), **PHONE)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    unfold(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    cell(page, trace, 0, 1).click()
    assert page.locator("#readout h3").is_visible()


def test_without_a_record_there_are_no_sliders(opened: Open, trace: LayerTrace) -> None:
    page = opened(render(trace, None, None))
    unfold(page)
    assert page.get_by_text("The trace came without a record").is_visible()
    assert not page.locator("#alpha").is_visible()
    assert page.locator("#lanes .verify").count() == len(trace.rounds) - 1


def test_128_tokens_and_30_layers_stay_small_and_quick(
    opened: Open, record: Record, capsys: pytest.CaptureFixture[str]
) -> None:
    """Size is limited; how long a slider takes is told, not asserted: it depends on the machine."""
    trace, long = long_trace(record)
    html = render(trace, long, some_costs(31, 16))
    assert len(html.encode("utf-8")) < 1_500_000
    page = opened(html)
    unfold(page)
    slider = page.locator("[data-layer]").first
    times = sorted(slider.evaluate(MOVE, tau) for tau in (0.3, 0.5, 0.7, 0.9, 0.25, 0.6))
    with capsys.disabled():
        sys.stdout.write(
            f"\n{len(html) / 1e6:.2f} MB; a slider move takes {times[2]:.0f} ms, "
            f"at most {times[-1]:.0f} ms, layout included\n"
        )
    assert page.locator("#map td").count() == 128 * 30


MOVE = """(node, value) => {
  const start = performance.now();
  node.value = value;
  node.dispatchEvent(new Event("input", { bubbles: true }));
  document.body.getBoundingClientRect();
  return performance.now() - start;
}"""
