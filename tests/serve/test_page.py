"""The chat page in a real browser, on a live server with the default model."""

from __future__ import annotations

import json
from collections import Counter
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest

from selfspec import serve
from selfspec.api.speculator import Speculator
from tests.browsers import (  # noqa: F401  # fixtures
    Open,
    Page,
    axe_findings,
    browser_fixture,
    expect,
    opened_fixture,
)
from tests.serve.live import Running, running, wait_until

QUESTION = "Write a Python function that counts the words in a file."
PAPER = "getComputedStyle(document.body).backgroundColor"
CHAT = "**/v1/chat/completions"
VENDOR = Path(serve.__file__).parent / "assets" / "vendor"


@pytest.fixture
def page(opened: Open, server: Running) -> Page:
    """The chat, on a large screen."""
    return opened(f"{server.address}/")


def ask(page: Page, question: str = QUESTION, tokens: int = 24) -> None:
    """Type a question and send it with Enter."""
    page.locator("#max_tokens").fill(str(tokens))
    page.locator("#question").focus()
    page.keyboard.type(question)
    page.keyboard.press("Enter")


def ended(page: Page) -> None:
    expect(page.get_by_role("button", name="Regenerate")).to_be_visible()


def shown(page: Page, place: int = 0) -> list[tuple[str, str]]:
    """The source and the text of each span of one answer."""
    spans = page.locator(".answer").nth(place).locator(".text span.piece")
    script = "nodes => nodes.map(node => [node.dataset.source, node.textContent])"
    return [(source, text) for source, text in spans.evaluate_all(script)]


def by_source(pieces: list[tuple[str, str]]) -> dict[str, str]:
    """The text of each source, without the boundaries of spans."""
    texts: dict[str, str] = {}
    for source, text in pieces:
        texts[source] = texts.get(source, "") + text
    return {source: text for source, text in texts.items() if text}


def explained(server: Running) -> dict[str, Any]:
    """The choice that the API gives for the same request, with explanations and usage."""
    body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
    answer = server.post({**body, "max_tokens": 24, "speculation": {"explain": True}}).json()
    return {**answer["choices"][0], "usage": answer["usage"]}


def test_an_answer_shows_the_figures_of_the_api(page: Page, server: Running) -> None:
    ask(page)
    expect(page.locator(".text .piece").first).to_be_visible()
    ended(page)
    assert axe_findings(page) == []
    page.get_by_label("Markdown").uncheck()  # show the text itself
    choice = explained(server)
    rounds = choice["speculation"]["rounds"]
    tokens = [token for entry in rounds for token in entry["tokens"]]
    expected = by_source([(token["source"], token["text"]) for token in tokens])
    assert by_source(shown(page)) == expected
    assert len(expected) > 1
    for source, count in Counter(token["source"] for token in tokens).items():
        assert page.locator(f"[data-count={source}]").inner_text() == str(count)
    usage = choice["usage"]["speculation"]
    drafts = f"{usage['num_accepted_tokens']} of {usage['num_draft_tokens']}"
    assert page.locator("[data-figure=drafts]").inner_text() == drafts
    steps = sum(entry["steps"] for entry in rounds)
    speed = float(page.locator("[data-figure=speed]").inner_text())
    plain = float(page.locator("[data-figure=plain]").inner_text().removeprefix("≈"))
    assert speed / plain == pytest.approx((len(tokens) - 1) / steps, rel=0.05)  # one decimal each
    style = "nodes => nodes.map(node => getComputedStyle(node).textDecorationStyle)"
    assert {*page.locator(".text .left").evaluate_all(style)} == {"solid"}
    rejected = [d for entry in rounds for d in entry["drafts"] if not d["accepted"]]
    assert page.locator(".reject").count() == len(rejected) > 0
    assert not page.locator(".reject").first.is_visible()


def test_the_page_works_with_the_keyboard_alone(opened: Open, server: Running) -> None:
    page = opened(f"{server.address}/", permissions=["clipboard-read", "clipboard-write"])
    assert page.evaluate("document.activeElement.id") == "question"
    page.keyboard.type(QUESTION[:20])
    page.keyboard.press("Shift+Enter")
    assert page.locator("#question").input_value() == QUESTION[:20] + "\n"
    page.keyboard.press("Backspace")
    ask(page, QUESTION[20:])
    ended(page)
    text = explained(server)["message"]["content"]
    assert page.locator("#said").text_content() == f"Answer: {text} "
    press(page, "rejects", ["Tab"] * 3 + ["Space"])
    expect(page.locator(".reject").first).to_be_visible()
    press(page, "speculation", ["Shift+Tab"] * 2 + ["Space"])
    press(page, "question", ["Shift+Tab"])
    page.keyboard.press("Shift+Tab")  # Regenerate
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == text
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # Stop has the focus now, until the answer ends
    expect(page.locator("[data-figure=drafts]")).to_have_text("none made")
    ended(page)
    assert page.evaluate("document.activeElement.id") == "question"
    page.get_by_label("Markdown").uncheck()
    assert by_source(shown(page)) == {"model": text}
    assert page.locator("[data-figure=round]").inner_text() == "1.00"


def press(page: Page, focus: str, keys: list[str]) -> None:
    """Press keys, then check that the element `focus` has the focus, visibly."""
    for key in keys:
        page.keyboard.press(key)
    assert page.evaluate("document.activeElement.id") == focus
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    assert page.evaluate(outline) == "solid"


def test_side_by_side_writes_the_same_text_on_a_phone_in_dark_mode(
    opened: Open, server: Running
) -> None:
    options = {"viewport": {"width": 360, "height": 740}, "color_scheme": "dark"}
    page = opened(f"{server.address}/", **options)
    dark = page.evaluate(PAPER)
    page.get_by_label("side by side").check()
    page.locator("#temperature").fill("0.8")  # no seed: the page draws one for both
    ask(page, "Tell me about seven rivers.", tokens=40)  # a short answer may have no draft
    expect(page.locator(".verdict")).to_contain_text("The same text, letter for letter")
    ended(page)
    drafted, plain = by_source(shown(page, 0)), by_source(shown(page, 1))
    assert len(drafted) > 1
    assert list(plain) == ["model"]
    page.get_by_label("rejected drafts").check()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert axe_findings(page) == []
    page.get_by_role("button", name="light").click()
    assert page.evaluate(PAPER) != dark
    page.get_by_role("button", name="New chat").click()
    expect(page.locator("#examples")).to_be_visible()
    assert page.locator("article").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


@pytest.mark.parametrize("way", ["Escape", "Stop", "New chat"])
def test_stop_ends_the_work_of_the_server(page: Page, server: Running, way: str) -> None:
    page.locator("#temperature").fill("2")
    page.locator("#seed").fill("1")
    ask(page, tokens=4000)
    expect(page.locator(".text .piece").first).to_be_visible()
    assert server.writer.open_choices == 1
    if way == "Escape":
        page.keyboard.press(way)
    else:
        page.get_by_role("button", name=way).click()
    wait_until(server.idle)
    if way == "New chat":
        expect(page.locator("#examples")).to_be_visible()
    else:
        expect(page.locator(".note")).to_have_text("Stopped.")
        ended(page)


def stream(texts: list[str], end: str = "data: [DONE]\n\n", drafts: Any = ()) -> str:
    """A scripted answer of the server, with one round per text.

    With `drafts`, each as (text, parent, accepted), one round has all texts as its tokens.
    """
    lines, origin = "", {"source": "grammar", "layer": None}
    nodes = [{"text": t, **origin, "parent": p, "accepted": kept} for t, p, kept in drafts]
    for group in [texts] if nodes else [[text] for text in texts]:
        text, tokens = "".join(group), [{"text": piece, **origin} for piece in group]
        entry = {"tokens": tokens, "drafts": nodes, "steps": 1, "ended": "off"}
        speculation = {"rounds": [entry], "num_layers": 2}
        choice = {"index": 0, "delta": {"content": text}, "speculation": speculation}
        lines += f"data: {json.dumps({'choices': [{**choice, 'finish_reason': None}]})}\n\n"
    return lines + end


def answer_with(page: Page, body: str | None) -> None:
    """Answer in place of the server. None aborts the request."""

    def reply(route: Any) -> None:
        route.abort() if body is None else route.fulfill(body=body)

    page.unroute(CHAT)
    page.route(CHAT, reply)


HOSTILE = (
    "<img src=x onerror=hacked=1><script>hacked=1</script><b onclick=hacked=1>no</b>",
    "<iframe srcdoc='<script>parent.hacked=1</script>'></iframe>\n\n<style>*{display:none}</style>",
    "[a](javascript:hacked=1) [b](JaVa&#115;cript:hacked=1) [c](data:text/html,x) [d](vbscript:x)",
    "<javascript:hacked=1> [e][f] [g](x-other:y) [h](h 'i\" onclick=\"hacked=1')\n\n[f]: file:x",
    "![p](http://p.example/p.png) ![q](data:image/png;base64,AAAA)",
    ">" * 5000 + " deep",
    "".join(f"{' ' * 2 * depth}- deep\n" for depth in range(60)),
    "*a **b " * 600 + "[" * 3000 + "`" * 999,
    "|a" * 40 + "|\n" + "|-" * 40 + "|\n" + "|b" * 40 + "|\n\n" + "x" * 400,
    "# <u>h</u>\n\n```html onclick=hacked=1\n<script>hacked=1</script>\n" + "y" * 400,
)


def test_hostile_answers_do_nothing(opened: Open, server: Running) -> None:
    page = opened(f"{server.address}/", viewport={"width": 360, "height": 740})
    for text in HOSTILE:
        answer_with(page, stream([text[at : at + 97] for at in range(0, len(text), 97)]))
        page.get_by_role("button", name="New chat").click()
        ask(page, "Go.")
        ended(page)
        contents = page.locator(".text").evaluate("""node => ({
            tags: [...node.querySelectorAll("*")].map(one => one.localName),
            names: [...node.querySelectorAll("*")].flatMap(one => one.getAttributeNames()),
            links: [...node.querySelectorAll("[href]")].map(one => one.href),
        })""")
        tags = "div p span em strong a h3 ul ol li blockquote pre code table thead tbody tr th td"
        assert set(contents["tags"]) <= set(tags.split())
        assert set(contents["names"]) <= {"class", "style", "title", "tabindex", "data-source"}
        assert contents["links"] == []
        page.get_by_label("Markdown").uncheck()
        assert page.locator(".text").text_content() == text
        page.get_by_label("Markdown").check()
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.evaluate("typeof hacked") == "undefined"
    assert axe_findings(page) == []


def test_markdown_keeps_the_colours_of_its_sources(page: Page) -> None:
    texts = ["## T", "op\n\n1. *a*", " &amp", "; [li", "nk](https://a.example)\n2. b\n   - c\n"]
    answer_with(
        page, stream([*texts, "\n``", "`py\nif a <", " b:\n", "  `", "``x\n```\n", "|d|\n|-|"])
    )
    ask(page)
    ended(page)
    shape = {"h3": "Top", "li": "a & link", "em": "a", "a": "link", "ul": "c", "th": "d"}
    for tag, text in {**shape, "pre": "if a < b:\n  ```x\n"}.items():
        assert page.locator(f".text {tag}").first.text_content() == text
    assert page.locator(".text a").get_attribute("href") == "https://a.example"
    assert by_source(shown(page)) == {"grammar": "Topa & linkbcif a < b:\n  ```x\nd"}
    title = page.locator(".grammar").first.get_attribute("title")
    assert title == "a draft of the grammar"
    assert axe_findings(page) == []


def test_conversations_stay_in_the_browser(page: Page) -> None:
    chats = page.locator("#chats li")
    for number in (1, 2):
        answer_with(page, stream([f"**{number}**", " done"]))
        page.get_by_role("button", name="New chat").click()
        ask(page, f"Question {number}?")
        ended(page)
    page.reload()
    assert chats.all_inner_texts() == ["Question 2?\n×", "Question 1?\n×"]
    page.get_by_role("button", name="Question 1?", exact=True).click()
    assert by_source(shown(page)) == {"grammar": "1 done"}
    assert page.locator("#chats [aria-current]").inner_text() == "Question 1?"
    assert axe_findings(page) == []
    answer_with(page, stream(["more"]))
    with page.expect_request(CHAT) as request:
        ask(page, "And?")
    body: Any = request.value.post_data_json
    texts = [turn["content"] for turn in body["messages"]]
    assert texts == ["Question 1?", "**1** done", "And?"]
    ended(page)
    with page.context.new_page() as tab:  # a chat continued in two tabs is kept twice
        tab.goto(page.url)
        tab.locator("#chats button").first.click()
        for view, question in ((page, "Then?"), (tab, "Else?")):
            answer_with(view, stream(["much more"]))
            ask(view, question)
            ended(view)
    expect(chats).to_have_count(3)
    page.on("dialog", lambda dialog: dialog.accept())
    for _ in range(2):
        page.get_by_role("button", name="Delete Question 1?").first.click()
    expect(page.locator("#examples")).to_be_visible()
    assert chats.all_inner_texts() == ["Question 2?\n×"]
    full = "(_, text) => { if (text !== '[]') throw new Error('full'); }"
    page.evaluate(f"void (Storage.prototype.setItem = {full})")
    ask(page, "Kept?")
    ended(page)
    expect(page.locator("#chats-hint")).to_contain_text("This browser stores nothing")
    assert chats.all_inner_texts() == ["Question 2?\n×"]


def test_a_text_file_goes_into_the_message(page: Page) -> None:
    page.locator("#question").fill("What is this?")
    for name, content, problem in (
        ("a.bin", b"\xff\xfe\x00", "a.bin is not UTF-8 text."),
        ("a.log", b"x" * 100_001, "a.log has 101 kB; the limit is 100 kB. Copy the part that"),
        ("a.md", "é\n```\nb\n```".encode(), ""),
    ):
        page.locator("#file").set_input_files({"name": name, "mimeType": "", "buffer": content})
        expect(page.locator("#problem")).to_contain_text(problem)
    expect(page.locator("#question")).to_have_value(
        "What is this?\n\na.md:\n````\né\n```\nb\n```\n````\n"
    )


def test_errors_are_shown(page: Page) -> None:
    page.locator("#drafter").select_option("draft-model")
    ask(page)
    expect(page.get_by_role("alert")).to_contain_text("needs a second model")
    for body, message in (
        (stream(["half"], end=""), "The connection ended before the answer did."),
        ('data: {"error": {"message": "it broke"}}\n\n', "it broke"),
        (None, "The server cannot be reached. Is it running?"),
    ):
        answer_with(page, body)
        page.get_by_role("button", name="Regenerate").click()
        expect(page.get_by_role("alert")).to_have_text(message)
        ended(page)
        expect(page.locator(".text")).to_have_text("half")  # the former answer stays
    page.reload()
    page.locator("#chats button").first.click()
    expect(page.locator(".text")).to_have_text("half")


def test_rejected_drafts_stand_before_the_token_in_their_place(page: Page) -> None:
    tree = [("a", -1, True), ("x", -1, False), ("b", 0, True), ("y", 0, False), ("z", 3, False)]
    answer_with(page, stream(["a", "b", "c"], drafts=[*tree, ("w", 2, False)]))
    ask(page)
    ended(page)
    text = page.locator(".answer .text")
    assert text.inner_text() == "abc"
    page.get_by_label("rejected drafts").check()
    assert text.inner_text() == "xayzbwc"
    starts = page.locator(".reject.other").all_text_contents()
    assert starts == ["x", "y", "w"]


def test_the_page_sends_a_key_to_a_server_that_requires_one(
    opened: Open, default: Speculator
) -> None:
    with running(default, keys=("right",)) as guarded:
        page = opened(f"{guarded.address}/")
        for key in ("wrong", "right"):
            page.get_by_label("API key").fill(key)
            page.keyboard.press("Enter")
        expect(page.locator("#facts")).to_contain_text(default.label)
        assert not page.locator("#key").is_visible()
        ask(page, tokens=2)
        ended(page)
        page.reload()
        expect(page.locator("#facts")).to_contain_text(default.label)
        storage = page.evaluate("JSON.stringify(localStorage) + document.cookie")
        assert "right" not in storage


def test_the_page_loads_nothing_from_elsewhere(server: Running) -> None:
    answer = httpx.get(server.address)
    policy = answer.headers["content-security-policy"]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["connect-src"] == "'self'"
    for name in ("default-src", "base-uri", "form-action", "frame-ancestors"):
        assert rules[name] == "'none'"
    assert "unsafe" not in policy
    assert rules["script-src"].startswith("'sha256-")
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    parser = VENDOR / "markdown-it.umd.min.js"
    html = answer.text.replace(parser.read_text(encoding="utf-8"), "").replace("https?|", "")
    assert "http" not in html
    assert sha256(parser.read_bytes()).hexdigest() in (VENDOR / "README.md").read_text()
