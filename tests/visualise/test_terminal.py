"""The terminal view: marks carry what colours say, and nothing in a text can break it."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from selfspec.pages import palette
from selfspec.visualise.layers import LayerTrace
from selfspec.visualise.terminal import show
from tests.traces import entry, long_trace, small_trace, trace_of

STRUCK, RED = "\x1b[9", "38;2;{};{};{}m".format(*palette.rgb(palette.REJECTED))


def printed(trace: LayerTrace, *, rejected: bool = True, **console: Any) -> str:
    """What a console shows; not a terminal unless asked."""
    out = io.StringIO()
    show(trace, Console(file=out, _environ={}, **console), rejected=rejected)
    return out.getvalue()


def terminal(trace: LayerTrace, width: int = 80, **console: Any) -> str:
    options: dict[str, Any] = {"force_terminal": True, "color_system": "truecolor", "width": width}
    return printed(trace, **options | console)


def test_a_pipe_gets_text_with_marks_and_no_escapes() -> None:
    words = (
        "\n"
        "33 % of this answer came as drafts, 1.7 tokens per verification\n"
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


def test_a_terminal_shows_the_answer_in_colours_and_strikes_drafts() -> None:
    shown = Text.from_ansi(terminal(small_trace(), rejected=False))
    assert shown.plain.startswith("A line\n kept checked deep\n\n33 % of this answer")
    looks = {shown.plain[s.start : s.end].strip(): str(s.style) for s in shown.spans}
    for word, layer in (("kept", 2), ("exit layer 2", 2), ("deep", 4), ("exit layer 4", 4)):
        assert palette.of_layer(layer, 6) in looks[word]
    struck = terminal(small_trace())
    assert f"{STRUCK};{RED}dropped" in struck
    assert "[-" not in struck


@pytest.mark.parametrize("console", [{"no_color": True}, {"color_system": None}])
def test_without_colours_there_are_marks(console: dict[str, Any]) -> None:
    shown = terminal(small_trace(), **console)
    assert "38;2" not in shown
    assert ("\x1b" in shown) is ("no_color" in console)
    assert "[-dropped-]" in shown
    assert "kept²" in shown


@pytest.mark.parametrize("width", [12, 30, 60])
def test_lines_fit_a_narrow_terminal(width: int) -> None:
    shown = terminal(small_trace(), width, color_system=None)
    assert max(map(len, shown.splitlines())) <= width
    assert "checked" in shown


def test_a_console_that_knows_ascii_only_gets_ascii() -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii")
    show(long_trace(["A", " \u4f60", "\n"]), Console(file=out, _environ={}), rejected=True)
    show(small_trace(), Console(file=out, _environ={}), rejected=True)
    out.flush()
    shown = raw.getvalue().decode("ascii")
    assert "A| \\u4f60|\\u23ce" in shown
    assert " kept^2 [-dropped-] checked| deep^4<end>" in shown


def test_control_characters_cannot_reach_the_terminal() -> None:
    shown = printed(long_trace(["\x1b[31mred", "[bold]x[/bold]", "\r\x07", "\u202e"]))
    assert "\x1b" not in shown
    assert "\\u001b[31mred· [bold]x[/bold]".replace(" ", "") in shown.replace(" ", "")
    assert "␍\\u0007" in shown
    assert "\\u202e" in shown


def test_drafts_from_elsewhere_have_marks_of_their_own() -> None:
    rounds = entry(1, prefill=True, ended="off"), entry(2, [0, 0], 1, sources=["ngram"] * 2)
    shown = printed(trace_of(rounds, ("A", " b", " c"), ((), (" b", " x\n"))))
    assert "A· bⁿ [-x⏎-] c\n" in shown
    assert "prompt lookupⁿ: 1 of 2 drafts kept" in shown
