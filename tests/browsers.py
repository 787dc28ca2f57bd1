"""A browser for the tests of pages: found as a user has it installed, or the test is skipped."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
from playwright.sync_api import Browser, Page, expect, sync_playwright  # noqa: E402  # after the check

__all__ = ["Browser", "Page", "chromium", "expect"]

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
