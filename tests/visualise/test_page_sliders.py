"""The controls of the HTML page in a real browser: they show what Python replayed."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest

from selfspec.eval.record import Record
from selfspec.visualise.grid import Axis, grid
from selfspec.visualise.layers import LayerTrace
from selfspec.visualise.page import most_rows, page_data, render
from tests.browsers import Page, axe_findings
from tests.pages import COSTS, PHONE, PROMPT, USED, cell, long_trace, set_slider, unfold
from tests.records import recorded
from tests.traces import alone, make_trace, some_costs

Open = Callable[..., Page]


@pytest.mark.parametrize("kind", ["translator", "deep-fused-0"])
def test_controls_show_what_their_setting_gives(opened: Open, kind: str) -> None:
    record = alone(recorded(kind).record, PROMPT)
    trace = make_trace(record, replace(USED, drafter="ngram+exit"))
    page = opened(render(trace, record, COSTS), **PHONE)
    unfold(page)
    assert page.locator("#notes li").count() == 0
    painted = [page.locator(name).inner_html() for name in ("#answer", "#depth")]
    data, found = page_data(trace, record, COSTS), grid(trace, record, most_rows(trace, record))
    shown = set()
    dice = random.Random(0)
    for drafter in found.drafters:
        page.locator("#drafter").select_option(drafter)
        axes = found.of(drafter)
        assert {axis.name for axis in found.axes if page.locator(f"#{axis.name}").is_visible()} == {
            axis.name for axis in axes if len(axis.values) > 1
        }
        for _ in range(5 if axes else 1):
            at = 0
            for axis in axes:
                stop = dice.randrange(len(axis.values))
                at = at * len(axis.values) + stop
                move(page, axis, stop)
            result = data["grid"]["results"][data["grid"]["points"][drafter][at]]
            counts = result["counts"]
            assert cells(page, "now") == {
                "rounds": f"{counts['rounds']}",
                "cr": f"{counts['cr']:.2f}",
                "drafted": f"{counts['drafted']}",
                "accepted": f"{counts['accepted']}",
                "acceptance": f"{counts['acceptance']:.1f}",
                "work": f"{counts['work']:.1f}",
                "speed": f"{counts['speed']:.3f}",
            }
            assert page.locator("#lanes .verify").count() == counts["rounds"]
            shown.add(tuple(result["rounds"]))
    assert len(shown) > 5
    assert axe_findings(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.locator("#controls .reset").click()
    assert cells(page, "now") == cells(page, "used")
    after = [page.locator(name).inner_html() for name in ("#answer", "#depth")]
    assert [html.replace(' style=""', "") for html in after] == painted


def move(page: Page, axis: Axis, stop: int) -> None:
    control = page.locator(f"#{axis.name}")
    if axis.name == "never-slower":
        control.set_checked(bool(stop))
    elif len(axis.values) > 1:
        set_slider(page, control, stop)
        assert control.get_attribute("aria-valuetext") == axis.texts[stop]


def cells(page: Page, column: str) -> dict[str | None, str]:
    """A column of the table beside the controls."""
    found = page.locator(f"#results [data-{column}]").all()
    return {cell.get_attribute(f"data-{column}"): cell.inner_text() for cell in found}


def test_a_threshold_of_another_setting_is_said(page: Page, record: Record) -> None:
    place, layer = 4, record.info.exit_layers[1]
    trace = make_trace(record, USED, [layer for layer in range(6) if layer != 4])
    cell(page, trace, place, layer).hover()
    assert page.get_by_text("τ 0.200:").is_visible()
    tau = page.locator("#tau")
    set_slider(page, tau, int(tau.get_attribute("max") or 0))
    cell(page, trace, place + 1, layer).hover()
    assert page.get_by_text("τ 0.900:").is_visible()


def test_without_a_record_there_are_no_sliders(opened: Open, trace: LayerTrace) -> None:
    page = opened(render(trace, None, None))
    unfold(page)
    assert page.get_by_text("The trace came without a record").is_visible()
    assert not page.locator("#controls").is_visible()
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
    times = sorted(page.locator("#tau").evaluate(MOVE, stop) for stop in (0, 1, 2, 3, 4, 0))
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
