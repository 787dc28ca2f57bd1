"""The HTML page opened in a browser: it may say nothing on the console, and load nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from selfspec.eval.record import Record
from selfspec.visualise.layers import LayerTrace
from selfspec.visualise.page import render
from tests.pages import COSTS, PROMPT, USED, unfold
from tests.records import recorded
from tests.traces import alone, make_trace

if TYPE_CHECKING:
    from tests.browsers import Browser, Page

Open = Callable[..., "Page"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from tests.browsers import chromium  # which skips where the package is missing

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
    from tests.browsers import listened  # as above

    said: list[str] = []
    asked: list[str] = []
    contexts = []

    def open_page(html: str, **options: Any) -> Page:
        file = tmp_path / "page.html"
        file.write_text(html, encoding="utf-8")
        page = listened(browser, said, asked, **options)
        contexts.append(page.context)
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
