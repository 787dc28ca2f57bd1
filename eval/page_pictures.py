"""Pictures of the chat page for the docs, from a server of its own.

    python -m eval.page_pictures docs/images

Needs the packages of `serve`, playwright and a Chromium.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import typer
from playwright.sync_api import Browser, Page, expect, sync_playwright

QUESTION = "Write a Python function that counts the words in a file."
WIDE, PHONE = {"width": 1200, "height": 800}, {"width": 360, "height": 740}
PATIENCE_MS = 120_000


def main(folder: Path) -> None:
    """chat.png, chat-dark.png and chat-phone.png into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "selfspec", "serve", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None  # noqa: S101  # asked for
        try:
            said = next(line for line in server.stderr if "http://" in line)
            address = next(word for word in said.split() if word.startswith("http://"))
            take(address.rstrip(".,").removesuffix("/v1"), folder)
        finally:
            server.terminate()


def take(address: str, folder: Path) -> None:
    """All pictures of the page at an address."""
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"))
        page = opened(browser, address, "light", WIDE)
        page.get_by_label("rejected drafts").check()
        ask(page, QUESTION, 90)
        page.screenshot(path=folder / "chat.png")
        page = opened(browser, address, "dark", WIDE)
        page.get_by_label("side by side").check()
        ask(page, "Name the planets in order, with one fact about each.", 90)
        page.screenshot(path=folder / "chat-dark.png")
        page = opened(browser, address, "light", PHONE)
        ask(page, "Write a JSON list of four fruits, each with a name and a colour.", 110)
        page.screenshot(path=folder / "chat-phone.png")
        browser.close()


def opened(browser: Browser, address: str, scheme: str, size: dict[str, int]) -> Page:
    """A fresh page."""
    page = browser.new_page(color_scheme=scheme, viewport=size)  # type: ignore[arg-type]  # words
    page.goto(address)
    return page


def ask(page: Page, question: str, tokens: int) -> None:
    """Ask, and wait for the whole answer."""
    page.get_by_label("most tokens").fill(str(tokens))
    page.get_by_label("Your message").fill(question)
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_role("button", name="Regenerate")).to_be_visible(timeout=PATIENCE_MS)


if __name__ == "__main__":
    typer.run(main)
