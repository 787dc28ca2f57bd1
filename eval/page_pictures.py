"""Pictures of the pages for the docs: the chat, from a server of its own, and one of the gallery.

    python -m eval.page_pictures docs/images          both
    python -m eval.page_pictures docs/images --trace-only

Needs the packages of `serve`, playwright and a Chromium.
"""

from __future__ import annotations

import lzma
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from playwright.sync_api import Browser, Page, expect, sync_playwright

from eval.gallery import TRACES, run
from eval.pictures import small

QUESTION = "Write a Python function that counts the words in a file."
TRACE = TRACES / "code.jsonl.xz"
"""Of the answer to this question."""
WIDE, PHONE = {"width": 1200, "height": 800}, {"width": 360, "height": 740}
PATIENCE_MS = 120_000


def main(
    folder: Path,
    *,
    trace_only: Annotated[bool, typer.Option(help="Leave the chat's as they are.")] = False,
) -> None:
    """chat.png and trace.png, each with -dark and -phone, into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    trace(folder)
    if not trace_only:
        chat(folder)


def trace(folder: Path) -> None:
    """The page of an answer; from a kept trace, so that no seconds are in it."""
    with tempfile.TemporaryDirectory() as scratch:
        kept, html = Path(scratch, "trace.jsonl"), Path(scratch, "trace.html")
        kept.write_bytes(lzma.decompress(TRACE.read_bytes()))
        run(["trace", "--from", str(kept), "--html", str(html)])
        with sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=shutil.which("chromium"))
            for name, scheme, size in (
                ("trace", "light", WIDE),
                ("trace-dark", "dark", WIDE),
                ("trace-phone", "light", PHONE),
            ):
                page = opened(browser, html.as_uri(), scheme, size)
                page.locator("#answer .seen").nth(4).dispatch_event("pointerover")
                if scheme == "dark":
                    page.locator("#lanes-title").evaluate("node => node.scrollIntoView()")
                    page.locator("#time").fill("300")
                page.wait_for_timeout(500)  # colours fade in
                page.screenshot(path=folder / f"{name}.png")
            browser.close()
    for name in ("trace", "trace-dark", "trace-phone"):
        small(folder / f"{name}.png")


def chat(folder: Path) -> None:
    """chat.png, chat-dark.png and chat-phone.png."""
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
