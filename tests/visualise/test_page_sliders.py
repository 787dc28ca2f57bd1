"""The sliders of the HTML page in a real browser: they replay what Python replays."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import pytest

from selfspec.config import SpeculationOptions
from selfspec.eval import replay
from selfspec.eval.record import Record
from selfspec.options import Exit, Prices
from selfspec.visualise.gain import gain
from selfspec.visualise.layers import LayerTrace
from selfspec.visualise.page import render
from tests.browsers import Page, axe_findings
from tests.pages import (
    COSTS,
    PHONE,
    PROMPT,
    USED,
    as_choice,
    cell,
    check_replayed,
    long_trace,
    many_settings,
    plain,
    python_results,
    result,
    set_slider,
    unfold,
)
from tests.records import recorded
from tests.traces import alone, make_trace, some_costs

Open = Callable[..., Page]


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
