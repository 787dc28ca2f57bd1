"""A browser for the tests of pages: found as a user has it installed, or the test is skipped."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from typing import Any

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
from playwright.sync_api import Browser, Page, expect, sync_playwright  # noqa: E402  # after the check

__all__ = ["Browser", "Page", "axe_findings", "chromium", "expect", "listened"]

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@contextmanager
def chromium() -> Iterator[Browser]:
    """Chromium, without a window."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"needs a browser: {', '.join(BROWSERS)}")
    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=found)
        yield started
        started.close()


def listened(browser: Browser, said: list[str], asked: list[str], **options: Any) -> Page:
    """A page of its own context; `said`: its messages and errors, `asked`: what it loads."""
    page = browser.new_context(**options).new_page()
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    return page


def axe_findings(page: Page) -> list[str]:
    """What axe-core has against a page: rule, place, why. Skips where the package is missing."""
    package = pytest.importorskip("axe_playwright_python", reason="needs axe-playwright-python")
    page.evaluate((files(package) / "axe.min.js").read_text(encoding="utf-8"))
    found = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")
    return [
        f"{rule['id']} {node['target']}: {node['failureSummary']}"
        for rule in found["violations"]
        for node in rule["nodes"]
    ]
