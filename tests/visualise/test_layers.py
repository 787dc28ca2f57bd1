"""A trace in a file, on a terminal, as a card and as a page: no text breaks a view."""

from __future__ import annotations

import io
import json
import re
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread
from rich.console import Console
from rich.text import Text

from selfspec import pages
from selfspec.config import SpeculationOptions
from selfspec.errors import InvalidData
from selfspec.visualise import layers, picture
from selfspec.visualise.layers import Gain, LayerTrace, gain, givers, rejections
from selfspec.visualise.views import page_data, render, show
from tests import traces
from tests.traces import INFO, TOKEN, entry, long_trace, small_trace, trace_of


def saved(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    small_trace().save(path)
    return path


def test_a_trace_survives_its_file_and_every_line_has_a_kind(tmp_path: Path) -> None:
    path = saved(tmp_path)
    assert LayerTrace.load(path) == small_trace()
    trace = long_trace(["\u2028", "\x85", '"\n\\', "\U0001f389"])  # some are line breaks to Python
    trace.save(tmp_path / "odd")
    assert LayerTrace.load(tmp_path / "odd") == trace
    lines = [json.loads(line) for line in path.read_text().split("\n")[:-1]]
    assert [line["type"] for line in lines] == ["info", *["place"] * 6, *["round"] * 4]
    assert lines[0]["format_version"] == 6
    options = SpeculationOptions().updated(lines[0]["options"])
    assert options == INFO.options
    assert lines[9]["passes"] == [[1, 0, 2], [1, 2, 4], [3, 4, 6]]


@pytest.mark.parametrize(
    ("line", "old", "new", "reason"),
    [
        (1, '"format_version": 6', '"format_version": 5', "line 1: format version 5, this self"),
        (1, '"type": "info"', '"type": "place"', "line 1: found 'place', the first line must be"),
        (1, "threshold=0.5/0.8", "threshold=0.5/0.8/0.9", "line 1 is no line of a trace"),
        (1, "threshold=0.5/0.8", "tau=0.5", "line 1: unknown setting of exit: 'tau'"),
        (1, '"num_layers": 6', '"num_layers": 4', "line 1: exit layers (2, 3, 4), the model has 4"),
        (1, '["translator", ', "[", "line 1: exit_layers, head_kinds and thresholds are"),
        (2, '"top_texts": [', '"top_texts": ["", ', "line 2: guesses of [5, 6] tokens"),
        (2, '"final_top_probs": [', '"final_top_probs": [0, ', "line 2: guesses of [5, 6] tokens"),
        (2, '"index": 0', '"index": 3', "line 2: place 3, expected 0"),
        (2, '"layer": 3', '"layer": 5', "line 2: exit layers [2, 5, 4] are not those of the"),
        (2, '"kind"', '"sort"', "unknown entry 'sort'"),
        (2, '"token": 7', '"token": 6', "rounds and places hold different tokens"),
        (3, "{", "", "line 3: it is not JSON"),
        (8, '"round"', '"turn"', "line 8: found 'turn', expected a place or a round"),
        (10, '"kept": [0]', '"kept": [2]', "drafts [2] were kept, of 2"),
        (10, '"parents": null', '"parents": [0, -1]', "parents [0, -1] are no tree of drafts"),
        (10, '"exit", "exit"', '"exit", "wish"', "line 10: unknown source of a draft 'wish'"),
        (10, '"exit_layers": [2', '"exit_layers": [6', "line 10: drafts of exit layers [6, 4]"),
        (10, '["exit", "exit"]', '["exit"]', "a round of 2 drafts says more or"),
        (10, '" dropped"', "3", "line 10: draft_texts are no texts"),
    ],
)
def test_a_damaged_file_is_named_with_line_and_reason(
    tmp_path: Path, line: int, old: str, new: str, reason: str
) -> None:
    path = saved(tmp_path)
    lines = path.read_text().split("\n")
    assert old in lines[line - 1]
    lines[line - 1] = lines[line - 1].replace(old, new, 1)
    path.write_text("\n".join(lines))
    with pytest.raises(InvalidData, match=f"^{path}.*{re.escape(reason)}"):
        LayerTrace.load(path)


def test_a_file_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    lines = saved(tmp_path).read_text().split("\n")
    for keep in (0, 1, 5, 9):
        (tmp_path / "cut").write_text("\n".join(lines[:keep]))
        with pytest.raises(InvalidData):
            LayerTrace.load(tmp_path / "cut")


# Guesses of layers, and places of rejected drafts


@pytest.mark.parametrize(
    ("right", "final", "stays", "head"),
    [
        ("..r", True, 4, 4),
        ("r.r", True, 4, 2),
        ("rrr", True, 2, 2),
        (".r.", True, 6, None),
        ("rrr", False, None, 2),
    ],
)
def test_layers_that_guess_the_token(
    right: str, final: bool, stays: int | None, head: int | None
) -> None:
    (place,) = long_trace(["a"]).places
    guesses = [
        replace(guess, top_tokens=(TOKEN if mark == "r" else 0, 1))
        for guess, mark in zip(place.layers, right, strict=True)
    ]
    place = replace(place, layers=tuple(guesses), final_top_tokens=(TOKEN if final else 0, 1))
    trace = long_trace(["a"])
    pair = layers.right_from(trace, place), layers.head_right(trace, place)
    assert pair == (stays, head)


@pytest.mark.parametrize(
    ("parents", "kept", "branches"),
    [
        (None, [0], [(1, [1, 2, 3])]),
        (None, [], [(0, [0, 1, 2, 3])]),
        (None, [0, 1, 2, 3], []),
        ([-1, -1, 0, 2], [0, 2], [(0, [1]), (2, [3])]),
        ([-1, 0, 0, 1], [], [(0, [0, 1]), (0, [2]), (0, [3])]),
        ([-1, -1, 1, 1], [1, 3], [(0, [0]), (1, [2])]),
    ],
)
def test_rejected_drafts_are_placed_where_they_began(
    parents: list[int] | None, kept: list[int], branches: list[tuple[int, list[int]]]
) -> None:
    step = entry(len(kept) + 1, [0] * 4, kept=kept, parents=parents)
    assert rejections(step) == branches
    assert trace_of([step], ["a"] * 5, [("b",) * 4]).stats.accepted == len(kept)


@pytest.mark.parametrize(
    ("text", "shown"),
    [(" a\n", "␣a⏎"), ("", "∅"), ("\t\x1b", "⇥\\u001b"), ("\u2028", "\\u2028"), ("é你", "é你")],
)
def test_invisible_characters_are_shown(text: str, shown: str) -> None:
    assert layers.visible(text) == shown


STRUCK, RED = "\x1b[9", "38;2;{};{};{}m".format(*bytes.fromhex(pages.REJECTED[1:]))


def printed(trace: LayerTrace, *, rejected: bool = True, **console: Any) -> str:
    """The output of a console that is no terminal by default."""
    out = io.StringIO()
    show(trace, Console(file=out, _environ={}, **console), rejected=rejected)
    return out.getvalue()


def terminal(trace: LayerTrace, width: int = 80, **console: Any) -> str:
    options: dict[str, Any] = {"force_terminal": True, "color_system": "truecolor", "width": width}
    return printed(trace, **options | console)


def test_a_pipe_gets_text_with_marks_and_no_escapes() -> None:
    words = (
        "\n"
        "33 % of this answer came as drafts, which cost what they gave: 1.0× plain decoding\n"
        "exit layer 2²: 1 of 1 drafts kept\n"
        "exit layer 4⁴: 1 of 2 drafts kept\n"
    )
    counts = (
        "6 tokens, 3 rounds, 1.67 tokens per verification, 2 of 3 drafts kept; why drafts ended: "
        "longest allowed 2, deepest exit layer 1\n"
    )
    answer = "A line⏎\n kept² checked deep⁴\n"
    assert printed(small_trace(), rejected=False, width=20) == answer + words + counts
    assert printed(small_trace(), width=20) == (
        "A· line⏎\n· kept² [-dropped-] checked· deep⁴<end>\n"
        + words
        + "[-token-]: a draft that was rejected   ·: the next round\n"
        + counts
    )
    assert "\n1 token, 0 rounds, " in printed(trace_of(small_trace().rounds[:1], ["A"], [()]))


def test_a_terminal_shows_the_answer_in_colours_and_strikes_drafts() -> None:
    text = Text.from_ansi(terminal(small_trace(), rejected=False))
    assert text.plain.startswith("A line\n kept checked deep\n\n33 % of this answer")
    styles = {text.plain[span.start : span.end].strip(): str(span.style) for span in text.spans}
    for word, layer in (("kept", 2), ("exit layer 2", 2), ("deep", 4), ("exit layer 4", 4)):
        assert pages.of_layer(layer, 6) in styles[word]
    struck = terminal(small_trace())
    assert f"{STRUCK};{RED}dropped" in struck
    assert "[-" not in struck


@pytest.mark.parametrize("console", [{"no_color": True}, {"color_system": None}])
def test_without_colours_there_are_marks(console: dict[str, Any]) -> None:
    output = terminal(small_trace(), **console)
    assert "38;2" not in output
    assert ("\x1b" in output) is ("no_color" in console)
    assert "[-dropped-]" in output
    assert "kept²" in output


def test_lines_fit_a_narrow_terminal() -> None:
    for width in (12, 30, 60):
        output = terminal(small_trace(), width, color_system=None)
        assert max(map(len, output.splitlines())) <= width
        assert "checked" in output


def test_an_ascii_console_gets_ascii() -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii")
    show(long_trace(["A", " \u4f60", "\n"]), Console(file=out, _environ={}), rejected=True)
    show(small_trace(), Console(file=out, _environ={}), rejected=True)
    out.flush()
    output = raw.getvalue().decode("ascii")
    assert "A| \\u4f60|\\u23ce" in output
    assert " kept^2 [-dropped-] checked| deep^4<end>" in output


def test_control_characters_cannot_reach_the_terminal() -> None:
    output = printed(long_trace(["\x1b[31mred", "[bold]x[/bold]", "\r\x07", "\u202e"]))
    assert "\x1b" not in output
    assert "\\u001b[31mred· [bold]x[/bold]".replace(" ", "") in output.replace(" ", "")
    assert "␍\\u0007" in output
    assert "\\u202e" in output


def test_drafts_from_elsewhere_have_marks_of_their_own() -> None:
    rounds = entry(1, prefill=True, ended="off"), entry(2, [0, 0], 1, sources=["ngram"] * 2)
    output = printed(trace_of(rounds, ("A", " b", " c"), ((), (" b", " x\n"))))
    assert "A· bⁿ [-x⏎-] c\n" in output
    assert "prompt lookupⁿ: 1 of 2 drafts kept" in output
    end = trace_of(rounds, ("A", "", " c"), ((), ("", " x")))  # an end token has no text
    assert printed(end, rejected=False).startswith("A c\n")


def test_the_gain_follows_from_rounds_and_costs() -> None:
    trace = small_trace()
    draft_gain = gain(trace)
    assert (draft_gain.tokens, draft_gain.drafted) == (6, 2)
    # three rounds, and three drafts, which exited at layers 2, 4 and 4 of 6
    assert trace.cost.gain(trace.rounds) == pytest.approx(5 / (3 + 3 * 0.08 + 10 / 6))
    assert gain(long_trace(["a", "b"])).headline.startswith("No draft was kept")
    words = [(giver.words, count) for giver, count in layers.source_counts(givers(trace))]
    assert words == [("the model", 4), ("exit layer 2", 1), ("exit layer 4", 1)]


def test_the_headline_states_the_gain() -> None:
    for times, words in (
        (1.1, ", 1.1× plain decoding"),
        (1.0, ", which cost what they gave: 1.0× plain decoding"),
        (0.9, ", which cost more than they gave: 0.9× plain decoding"),
    ):
        draft_gain = Gain(tokens=50, drafted=22, speed_up=times)
        assert draft_gain.headline == f"44 % of this answer came as drafts{words}"
        end = ", 0.9× plain decoding" if times == 0.9 else "of the whole model"
        assert draft_gain._replace(drafted=0).headline.endswith(end)
    assert draft_gain._replace(drafted=0, speed_up=1.0).verdict == ""  # as where drafting is off


def test_a_card_holds_any_text_silently(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    loss = Gain(tokens=50, drafted=22, speed_up=0.8)
    monkeypatch.setattr(picture, "gain", lambda *_: loss)
    odd = ["你好世界你好世界", "🎉", "", "\ufffd", "שלום", "\u0301"]
    odd += ["\x00", "$x^2$", "x" * 300, " ", "\n"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name, trace in {"small": small_trace(), "long": long_trace(odd * 20)}.items():
            picture.save_card(trace, tmp_path / f"{name}.png")
            picture.save_card(trace, tmp_path / "again.png")
            content = (tmp_path / f"{name}.png").read_bytes()
            assert content == (tmp_path / "again.png").read_bytes()
            image = imread(tmp_path / f"{name}.png")
            assert image.shape[:2] == (675, 1200)
            assert (image[:, 320:336, :3].std(axis=(0, 1)) < 0.01).all()  # text stays in its box


def test_a_card_has_each_draft_in_its_colour(tmp_path: Path) -> None:
    picture.save_card(small_trace(), tmp_path / "card.png")
    colours = {
        tuple(pixel)
        for pixel in (imread(tmp_path / "card.png")[..., :3] * 255).round().reshape(-1, 3)
    }
    for layer in (2, 4):
        assert tuple(bytes.fromhex(pages.of_layer(layer, 6)[1:])) in colours
    assert tuple(bytes.fromhex(pages.SEEN[1:])) not in colours


def test_characters_without_a_glyph_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert picture.drawable("aä␣⏎…") == "aä␣⏎…"
    monkeypatch.setattr(picture, "_glyphs", lambda: frozenset(map(ord, "abc")))
    assert picture.drawable("a你🎉") == "aU+4F60U+1F389"


def test_wide_characters_count_twice() -> None:
    texts = {"abcdef": "abcdef", "abcdefg": "abcde…", "你好世界": "你好…", "": ""}
    assert {text: picture.cut_text(text, 6) for text in texts} == texts


# The HTML page as text; test_page_browser opens it


def test_texts_of_tokens_cannot_leave_their_element_and_nothing_is_loaded() -> None:
    page = render(traces.drawn_trace())
    # as a browser reads it: up to the first closing tag
    start = '<script type="application/json" id="data">'
    (text,) = re.findall(f"{start}(.*?)</script", page, re.DOTALL | re.IGNORECASE)
    data = json.loads(text)
    assert "</script>" in [text for _, text, _ in data["words"]]
    assert "Say &lt;/script&gt; and &lt;script&gt;hacked = 1&lt;/script&gt;.</p>" in page
    assert len(re.findall(r"<script", page)) == 2
    assert "<title>Say &lt;/script&gt; and" in page
    assert "default-src 'none'" in page
    assert re.search("https?://", page) is None


def test_page_data_has_the_source_and_time_of_each_token() -> None:
    trace = traces.drawn_trace()
    data = page_data(trace)
    places = data["places"]
    words = [data["givers"][place["giver"]]["words"] for place in places]
    assert words == [giver.words for giver in givers(trace)]
    assert {giver["words"]: giver["count"] for giver in data["givers"]} == Counter(words)
    branches = [branch["text"] for place in places for branch in place["rejected"]]
    assert sorted(branches) == sorted(
        "".join(traces.text_of(step.draft_tokens[draft]) for draft in branch)
        for step in trace.rounds
        for _, branch in rejections(step)
    )
    steps = [sum(times) for _, *times in data["rounds"]]
    assert (len(places) - 1) / sum(steps) == pytest.approx(trace.cost.gain(trace.rounds), rel=1e-3)
    assert steps[0] == 0
