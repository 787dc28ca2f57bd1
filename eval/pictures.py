"""Makes the pictures of the docs and of README, and the traces of the gallery's pages.

    python -m eval.pictures gallery               all commands of docs/gallery.md
    python -m eval.pictures gallery code story    some of them
    python -m eval.pictures pages docs/images     a chat with a new server, and a trace
    python -m eval.pictures race docs/images --dtype float32
    python -m eval.pictures bars results/rivals/summary.json docs/images
    python -m eval.pictures bars results/policies/summary.json docs/images --over plain

`gallery`: each `selfspec trace --html NAME.html ..` gives docs/gallery/NAME.jsonl.xz, a trace from
which docs/hooks.py makes the page, and a card, docs/images/gallery/NAME.png. Costs are fixed, so
that the pages do not depend on the machine. `pages` needs the packages of `serve`, playwright and a
Chromium. `race`: a looping animation of one answer by `model.generate` and by selfspec, at true
speed; readers who prefer reduced motion see both texts whole. Nothing else should run on the
machine. `bars`: the speed of each way to answer, from `eval.compare --numbers`; or, over plain
decoding, the speed of each drafter, from `bench`.
"""

from __future__ import annotations

import json
import lzma
import re
import shlex
import shutil
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from html import escape
from itertools import groupby, starmap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import typer
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from torch import Tensor

from eval import compare, lab, serving
from selfspec.api.speculator import Speculator
from selfspec.api.text import TextDecoder, encode
from selfspec.errors import InvalidOption
from selfspec.eval.bench import METHODS, Arrivals
from selfspec.files import write
from selfspec.model.weights import keep_numbers
from selfspec.pages import TONES

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

DOCS = Path(__file__).parents[1] / "docs"
COSTS = "row=0.2/0.27,head=0.15"  # costs for the gallery's traces
PAGE, TRACES, PICTURES = DOCS / "gallery.md", DOCS / "gallery", DOCS / "images" / "gallery"


def shrink(picture: Path) -> None:
    """Reduce a picture to 256 colours, which is enough for text on a plain background."""
    with Image.open(picture) as image:
        reduced = image.convert("RGB").quantize(256, dither=Image.Dither.NONE)
    note = PngInfo()
    note.add_text("Software", "selfspec")  # so that the next run may replace the file
    reduced.save(picture, optimize=True, pnginfo=note)


# --- the gallery

_COMMAND = re.compile(r"^selfspec (trace --html .*)", re.MULTILINE)


def gallery(
    names: Annotated[list[str] | None, typer.Argument(help="Default: all.")] = None,
) -> None:
    """Ask the default model; write the traces of the pages, and the cards."""
    for words in commands():
        name = Path(words[2]).stem
        if names and name not in names:
            continue
        with tempfile.TemporaryDirectory() as scratch:
            jsonl = Path(scratch, "trace.jsonl")
            lab.selfspec_command("trace", "--output", str(jsonl), "--costs", COSTS, *words[3:])
            card = ["--card", str(PICTURES / f"{name}.png"), "--overwrite"]
            lab.selfspec_command("trace", "--from", str(jsonl), *card)
            packed = lzma.compress(jsonl.read_bytes(), preset=9 | lzma.PRESET_EXTREME)
        write(TRACES / f"{name}.jsonl.xz", packed)
        shrink(PICTURES / f"{name}.png")


def commands() -> list[list[str]]:
    """Words of each command after `selfspec`; the third is the page's file."""
    text = PAGE.read_text(encoding="utf-8").replace("\\\n", "")
    return [shlex.split(line, comments=True) for line in _COMMAND.findall(text)]


# --- pages, in a browser

WIDE, PHONE = {"width": 1200, "height": 800}, {"width": 360, "height": 740}


def pages(
    folder: Path,
    *,
    trace_only: Annotated[bool, typer.Option(help="Keep the chat's pictures.")] = False,
) -> None:
    """Write chat.png and trace.png, each with -dark and -phone, to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    trace(folder)
    if not trace_only:
        with serving.running_server(serving.serve_command()) as address:
            chat(address, folder)


def trace(folder: Path) -> None:
    """Picture the page of an answer, from a stored trace, so that it shows no wall times."""
    with tempfile.TemporaryDirectory() as scratch, browser() as chromium:
        jsonl, html = Path(scratch, "trace.jsonl"), Path(scratch, "trace.html")
        jsonl.write_bytes(lzma.decompress((TRACES / "code.jsonl.xz").read_bytes()))
        lab.selfspec_command("trace", "--from", str(jsonl), "--html", str(html))
        for name, scheme, size in (
            ("trace", "light", WIDE),
            ("trace-dark", "dark", WIDE),
            ("trace-phone", "light", PHONE),
        ):
            page = open_page(chromium, html.as_uri(), scheme, size)
            page.locator("#answer .seen").nth(4).dispatch_event("pointermove")
            if scheme == "dark":
                page.locator("#lanes-title").evaluate("node => node.scrollIntoView()")
                page.locator("#time").fill("300")
            page.wait_for_timeout(500)  # colours fade in
            page.screenshot(path=folder / f"{name}.png")
            shrink(folder / f"{name}.png")


def chat(address: str, folder: Path) -> None:
    with browser() as chromium:
        page = open_page(chromium, address, "light", WIDE)
        page.get_by_label("rejected drafts").check()
        ask(page, "Write a Python function that counts the words in a file.", 90)
        page.screenshot(path=folder / "chat.png")
        page = open_page(chromium, address, "dark", WIDE)
        page.get_by_label("side by side").check()
        ask(page, "Name the planets in order, with one fact about each.", 90)
        page.screenshot(path=folder / "chat-dark.png")
        page = open_page(chromium, address, "light", PHONE)
        ask(page, "Write a JSON list of four fruits, each with a name and a colour.", 110)
        page.screenshot(path=folder / "chat-phone.png")


@contextmanager
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=shutil.which("chromium"))
        yield chromium
        chromium.close()


def open_page(browser: Browser, address: str, scheme: str, size: dict[str, int]) -> Page:
    page = browser.new_page(color_scheme=scheme, viewport=size)  # type: ignore[arg-type]  # words
    page.goto(address)
    return page


def ask(page: Page, question: str, tokens: int) -> None:
    from playwright.sync_api import expect

    page.get_by_label("max_tokens").fill(str(tokens))
    page.get_by_label("Your message").fill(question)
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_role("button", name="Regenerate")).to_be_visible(timeout=120_000)


# --- SVG, light and dark

Look = dict[str, str]  # colours by their names in CSS

LOOKS: dict[str, Look] = {
    scheme: {name: getattr(tone, scheme) for name, tone in TONES.items()}
    for scheme in ("light", "dark")
}


def draw_schemes(folder: Path, name: str, draw: Callable[[Look], str]) -> None:
    for scheme, look in LOOKS.items():
        write(folder / f"{name}-{scheme}.svg", draw(look))


def document(width: int, height: float, look: Look, title: str, body: str, style: str = "") -> str:
    """An SVG document with a frame; `body` and `style` are already markup."""
    card, rule = look["card"], look["rule"]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:g}" role="img" '
        'font-family="ui-monospace,SFMono-Regular,Menlo,Consolas,monospace" font-size="13.5">'
        f"<title>{escape(title)}</title><style>{style}</style>"
        f'<rect x=".5" y=".5" width="{width - 1}" height="{height - 1:g}" rx="10" '
        f'fill="{card}" stroke="{rule}"/>{body}</svg>\n'
    )


def label(
    text: str, x: float, y: float, colour: str, *, weight: int = 400, anchor: str = "start"
) -> str:
    """An SVG text at (x, y); `text` is already markup."""
    return (
        f'<text x="{x:g}" y="{y:g}" fill="{colour}" font-weight="{weight}" '
        f'text-anchor="{anchor}" xml:space="preserve">{text}</text>'
    )


# --- the race

PROMPT = "Explain in a few sentences how a rainbow forms."

WIDTH = 880
COLUMN, LETTERS, TOP, LINE = 432, 50, 66, 19
TIMES = 5

REST_S = 3.0
"""Seconds for which both whole texts are shown, as a first frame, before they are written."""


@dataclass(frozen=True)
class Run:
    """One answer: its name, and each piece of text with its arrival time in seconds."""

    name: str
    pieces: list[tuple[str, float]]

    @property
    def text(self) -> str:
        return "".join(piece for piece, _ in self.pieces)

    @property
    def seconds(self) -> float:
        return self.pieces[-1][1]


def race(
    folder: Path,
    prompt: Annotated[str, typer.Option()] = PROMPT,
    new_tokens: Annotated[int, typer.Option(min=2, help="Maximum new tokens.")] = 110,
    dtype: Annotated[str | None, typer.Option(help="Of both models.")] = None,
) -> None:
    """Measure one answer in both ways; write race-light.svg and race-dark.svg."""
    torch.set_num_threads(2)
    speculator = lab.load(dtype=dtype)
    keep_numbers(speculator.model)  # generate then runs the model at its fastest
    ids = encode(speculator.tokenizer, prompt)
    runs = []
    for name, method in (("selfspec", "ngram+exit"), ("model.generate", "hugging-face")):
        _, *tries = [measure(name, speculator, method, ids, new_tokens) for _ in range(TIMES + 1)]
        runs.append(sorted(tries, key=lambda run: run.seconds)[TIMES // 2])  # without the warm-up
    if len({run.text for run in runs}) > 1:
        raise InvalidOption("the texts differ at a near tie. Give --dtype float32")
    draw_schemes(folder, "race", partial(draw_race, runs))
    for run in runs:
        print(f"{run.name}: {run.seconds:.2f} s, first text after {run.pieces[0][1]:.2f} s")


def measure(name: str, speculator: Speculator, method: str, ids: Tensor, count: int) -> Run:
    streamer, start = Arrivals(time.perf_counter), time.perf_counter()
    answer = METHODS[method].decode(speculator, ids, count, {}, streamer)
    text, at, pieces = TextDecoder(speculator.tokenizer), 0, []
    for tokens, moment in streamer.events:
        piece = text.push(answer.token_ids[at : at + tokens])
        at += tokens
        pieces.append((piece, moment - start))
    pieces.append((text.push([], last=True), pieces[-1][1]))
    return Run(name, [entry for entry in pieces if entry[0]])


def lines(run: Run) -> Iterator[list[tuple[str, float]]]:
    """Yield the wrapped lines, each as pieces that arrived together, with their seconds."""
    timed = iter([second for piece, second in run.pieces for _ in piece])
    for paragraph in run.text.replace("\t", " ").split("\n"):  # wrap would make eight letters of it
        for line in textwrap.wrap(paragraph, LETTERS, drop_whitespace=False) or [""]:
            letters = [*zip(line, timed)]  # noqa: B905  # as many as there are
            shown = letters[1:] if line.startswith(" ") else letters
            grouped = groupby(shown, lambda pair: pair[1])
            yield [("".join(letter for letter, _ in group), second) for second, group in grouped]
        next(timed, None)  # the newline


def draw_race(runs: Sequence[Run], look: Look) -> str:
    """The picture: names, texts, times. selfspec is on the left, because that is read first."""
    slow = max(run.seconds for run in runs)
    moments = sorted({second for run in runs for _, second in run.pieces})
    names = {second: f"t{number}" for number, second in enumerate(moments)}

    def appearing(text: str, second: float) -> str:
        return f'<tspan class="{names[second]}">{escape(text)}</tspan>'

    body, most = "", 0
    for left, run in zip((18, 18 + COLUMN), runs, strict=True):
        colour = look["good"] if run.seconds < slow else look["dim"]
        body += label(escape(run.name), left, 34, colour, weight=700)
        body += f'<path d="M{left} 44h{COLUMN - 32}" stroke="{look["rule"]}"/>'
        count = 0
        for count, line in enumerate(lines(run), 1):  # `count` is used after the loop
            text = "".join(starmap(appearing, line))
            body += label(text, left, TOP + LINE * (count - 1), look["ink"])
        times = f", {slow / run.seconds:.1f}× as fast" if run.seconds < slow else ""
        end = appearing(f"{run.seconds:.1f} seconds{times}", run.seconds)
        body += label(end, left, TOP + LINE * count + 14, colour, weight=700)
        most = max(most, count)
    summary = "; ".join(f"{run.name} in {run.seconds:.1f} seconds" for run in runs)
    title, style = f"The same answer twice: {summary}", animation(names, slow)
    return document(WIDTH, TOP + LINE * most + 44, look, title, body, style)


def animation(names: dict[float, str], slow: float) -> str:
    """The style: first shows all text, then none, then each piece from its own moment on."""
    total, rest = REST_S + slow, 100 * REST_S / (REST_S + slow)
    shares = {name: rest + 100 * second / total for second, name in names.items()}
    frames = "".join(
        f"@keyframes {name}{{0%,{rest:.2f}%{{fill-opacity:1}}{rest + 0.01:.2f}%,{share - 0.01:.2f}%"
        f"{{fill-opacity:0}}{share:.2f}%,100%{{fill-opacity:1}}}}"
        f".{name}{{animation:{name} {total:.2f}s infinite}}"
        for name, share in shares.items()
    )
    return frames + "@media (prefers-reduced-motion:reduce){*{animation:none!important}}"


# --- bars

NAMES = {
    compare.THEIRS: "Hugging Face",
    compare.THEIRS + compare.LOOKUP: "Hugging Face, prompt lookup",
    compare.LLAMA: "llama.cpp",
    compare.LLAMA + compare.LOOKUP: "llama.cpp, prompt lookup",
    compare.OPENVINO: "OpenVINO GenAI",
    compare.OPENVINO + compare.LOOKUP: "OpenVINO GenAI, prompt lookup",
    compare.INT4: "OpenVINO GenAI, its int4",
    compare.INT4 + compare.LOOKUP: "OpenVINO int4, prompt lookup",
    lab.PLAIN.label: "selfspec, no drafts",
    compare.DEFAULT: "selfspec",
}
POLICIES = {
    "ngram": "prompt lookup",
    "ngram+successors": "Token Recycling",
    "lookahead": "lookahead, N, W, G = 3, 2, 2",
    "lookahead-5-7-7": "lookahead, 5, 7, 7",
    "rest": "a datastore (REST)",
    "ngram+rest": "prompt lookup and REST",
    "medusa": "Medusa-1",
    "self-sd": "Self-SD",
    "swift": "SWIFT",
    "speculation": "exit heads alone",
    "ngram+exit": "prompt lookup and exit heads",
}
OURS = {lab.PLAIN.label, compare.DEFAULT, "ngram+exit"}  # the last is `default` with heads
LEFT, FIRST, ROW, THICK = 260, 54, 34, 20
LONGEST = WIDTH - LEFT - 90


def bars(summary: Path, folder: Path, over: str = compare.THEIRS) -> None:
    """Write speed-light.svg and -dark.svg, with speed-ups over `model.generate`.

    With another `over`, policies-light.svg and -dark.svg. Raises KeyError if the result lacks it.
    """
    overall = json.loads(summary.read_text(encoding="utf-8"))["all"]["overall"]
    name, names = ("speed", NAMES) if over == compare.THEIRS else ("policies", POLICIES)
    times = {key: overall[key][f"over_{over}"]["ratio"] for key in names if key in overall}
    head = "model.generate" if over == compare.THEIRS else "plain decoding"
    draw_schemes(folder, name, partial(draw_bars, times, names, head))


def draw_bars(times: dict[str, float], names: dict[str, str], over: str, look: Look) -> str:
    """One bar per entry, the slowest first."""
    most = max(times.values())
    rows = []
    for place, (name, ratio) in enumerate(sorted(times.items(), key=lambda entry: entry[1])):
        y, weight = FIRST + ROW * place, 700 if name in OURS - {lab.PLAIN.label} else 400
        length = LONGEST * ratio / most
        rows += [
            label(names[name], LEFT - 14, y + 15, look["ink"], weight=weight, anchor="end"),
            f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{THICK}" rx="3" '
            f'fill="{look["good" if name in OURS else "other"]}"/>',
            label(f"{ratio:.2f}×", LEFT + length + 10, y + 15, look["ink"], weight=weight),
        ]
    head = label(f"Times as fast as {over}", 18, 34, look["dim"])
    summary = ", ".join(f"{names[name]} {ratio:.2f}" for name, ratio in times.items())
    height = FIRST + ROW * len(times) + 10
    return document(WIDTH, height, look, f"Times as fast: {summary}", head + "".join(rows))


if __name__ == "__main__":
    lab.run(gallery, pages, race, bars)
