"""A card fits, whatever the answer holds, in the colours of who gave each token."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.image import imread

from selfspec.pages import palette
from selfspec.visualise import picture
from selfspec.visualise.layers import Gain, counted, gain, givers, head_right, right_from
from selfspec.visualise.picture import drawable, fitting, flow
from tests.hand_traces import long_trace, place, small_trace
from tests.traces import some_costs

ODD = [
    "你好世界你好世界",
    "🎉",
    "",
    "\ufffd",
    "שלום",
    "\u0301",
    "\x00",
    "$x^2$",
    "x" * 300,
    " ",
    "\n",
]


def width(text: str) -> float:
    return float(len(text))


def test_lines_break_before_words_and_hold_all_text() -> None:
    texts = ["One", " two", "two", " three\n\n  ", "four", " " + "x" * 25]
    runs = flow(texts, width, 10)
    lines = {run.line: "" for run in runs}
    for run in runs:
        assert run.left + run.width <= 10
        lines[run.line] += run.text
    assert list(lines.values()) == ["One twotwo", "three", "  four", "x" * 9, "x" * 9, "x" * 7]
    assert [*lines] == [0, 1, 3, 4, 5, 6]  # one line is empty
    assert {run.place for run in runs} == {*range(6)}


def test_a_gain_is_what_rounds_and_costs_say() -> None:
    trace = small_trace()
    found = gain(trace)
    assert (found.tokens, found.drafted) == (6, 2)
    assert found.headline == "33 % of this answer came as drafts, 1.7 tokens per verification"
    costs = some_costs(6, 3)
    speed_up = 5 * costs.plain_step() / costs.seconds_of(trace.rounds)
    assert gain(trace, costs).headline.endswith(f", {speed_up:.1f}× plain decoding")
    assert gain(long_trace(["a", "b"])).headline.startswith("No draft was kept")
    words = [(giver.words, count) for giver, count in counted(givers(trace))]
    assert words == [("the model", 4), ("exit layer 2", 1), ("exit layer 4", 1)]
    assert (right_from(trace, place(0, "a")), head_right(trace, place(0, "a"))) == (4, 4)


@pytest.mark.parametrize(
    ("speed_up", "words"),
    [
        (None, "came as drafts, 1.5 tokens per verification"),
        (1.06, "came for nothing, 1.1× plain decoding"),
        (1.04, "came as drafts, which cost what they gave: 1.0× plain decoding"),
        (0.94, "came as drafts, which cost more than they gave: 0.9× plain decoding"),
    ],
)
def test_a_headline_says_for_nothing_only_where_drafts_gained(
    speed_up: float | None, words: str
) -> None:
    found = Gain(tokens=50, drafted=22, per_verification=1.5, speed_up=speed_up)
    assert found.headline == f"44 % of this answer {words}"
    assert replace(found, drafted=0).headline.endswith(
        ", 0.9× plain decoding" if speed_up == 0.94 else "of the whole model"
    )


def test_a_card_holds_any_text_without_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loss = Gain(tokens=50, drafted=22, per_verification=1.5, speed_up=0.8)
    monkeypatch.setattr(picture, "gain", lambda *_: loss)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name, trace in {"small": small_trace(), "long": long_trace(ODD * 20)}.items():
            picture.save_card(trace, tmp_path / f"{name}.png")
            picture.save_card(trace, tmp_path / "again.png")
            made = (tmp_path / f"{name}.png").read_bytes()
            assert made == (tmp_path / "again.png").read_bytes()
            shown = imread(tmp_path / f"{name}.png")
            assert shown.shape[:2] == (675, 1200)
            assert (shown[:, 320:336, :3].std(axis=(0, 1)) < 0.01).all()  # words stay in their box


def test_a_card_has_each_draft_in_its_colour(tmp_path: Path) -> None:
    picture.save_card(small_trace(), tmp_path / "card.png")
    shown = {
        tuple(pixel)
        for pixel in (imread(tmp_path / "card.png")[..., :3] * 255).round().reshape(-1, 3)
    }
    for layer in (2, 4):
        assert tuple(bytes.fromhex(palette.of_layer(layer, 6)[1:])) in shown
    assert tuple(bytes.fromhex(palette.SEEN[1:])) not in shown


def test_characters_without_a_glyph_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert drawable("aä␣⏎…") == "aä␣⏎…"
    monkeypatch.setattr(picture, "_glyphs", lambda: frozenset(map(ord, "abc")))
    assert drawable("a你🎉") == "aU+4F60U+1F389"


@pytest.mark.parametrize(
    ("text", "columns", "shown"),
    [("abcdef", 6, "abcdef"), ("abcdefg", 6, "abcde…"), ("你好世界", 6, "你好…"), ("", 3, "")],
)
def test_wide_characters_count_twice(text: str, columns: int, shown: str) -> None:
    assert fitting(text, columns) == shown
