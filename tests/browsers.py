"""A browser for the tests of pages: the installed one; without one the test is skipped."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from importlib.resources import files
from typing import Any

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
from playwright.sync_api import Browser, Page, expect, sync_playwright  # noqa: E402  # after the check

__all__ = ["Browser", "Open", "Page", "axe_findings", "browser_fixture", "expect", "opened_fixture"]

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

REFUSED = "Failed to load resource"
"""Console message of a browser for any status above 399."""

expect.set_options(timeout=60_000)  # for a busy machine

Open = Callable[..., Page]


@pytest.fixture(name="browser", scope="module")
def browser_fixture() -> Iterator[Browser]:
    """Chromium, without a window."""
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"needs a browser: {', '.join(BROWSERS)}")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path)
        yield browser
        browser.close()


@pytest.fixture(name="opened")
def opened_fixture(browser: Browser) -> Iterator[Open]:
    """`opened(address, **context)` opens a page; it must log nothing and request no other host."""
    messages, urls, homes = list[str](), list[str](), ["data:"]

    def open_page(address: str, **options: Any) -> Page:
        homes.append(address)
        page = browser.new_context(**options).new_page()
        page.on("console", lambda message: messages.append(message.text))
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.on("request", lambda request: urls.append(request.url))
        page.set_default_timeout(30_000)
        page.goto(address)
        page.wait_for_selector("html[data-ready]")
        return page

    yield open_page
    for context in browser.contexts:
        context.close()
    assert [message for message in messages if not message.startswith(REFUSED)] == []
    assert [url for url in urls if not url.startswith(tuple(homes))] == []


def axe_findings(page: Page) -> list[str]:
    """Violations that axe-core finds: rule, place, reason. Skips if the package is missing."""
    package = pytest.importorskip("axe_playwright_python", reason="needs axe-playwright-python")
    page.evaluate((files(package) / "axe.min.js").read_text(encoding="utf-8"))
    report = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")
    return [
        f"{rule['id']} {node['target']}: {node['failureSummary']}"
        for rule in report["violations"]
        for node in rule["nodes"]
    ]
