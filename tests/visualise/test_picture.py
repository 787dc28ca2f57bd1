"""A card fits, whatever the answer holds, in the colours of who gave each token."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from matplotlib.image import imread

from selfspec.pages import palette
from selfspec.visualise import picture
from selfspec.visualise.layers import Gain, gain, givers, ranked
from selfspec.visualise.picture import drawable, fitting
from tests.traces import long_trace, small_trace, some_costs

ODD = [
    *("你好世界你好世界", "🎉", "", "\ufffd", "שלום", "\u0301"),
    *("\x00", "$x^2$", "x" * 300, " ", "\n"),
]


def test_a_gain_is_what_rounds_and_costs_say() -> None:
    trace = small_trace()
    found = gain(trace)
    assert (found.tokens, found.drafted) == (6, 2)
    assert found.headline == "33 % of this answer came as drafts, 1.7 tokens per verification"
    costs = some_costs(6, 3)
    speed_up = 5 * costs.plain_step() / costs.seconds_of(trace.rounds)
    assert gain(trace, costs).headline.endswith(f", {speed_up:.1f}× plain decoding")
    assert gain(long_trace(["a", "b"])).headline.startswith("No draft was kept")
    words = [(giver.words, count) for giver, count in ranked(givers(trace))]
    assert words == [("the model", 4), ("exit layer 2", 1), ("exit layer 4", 1)]


@pytest.mark.parametrize(
    ("times", "words"),
    [
        (None, "came as drafts, 1.5 tokens per verification"),
        (1.1, "came as drafts, 1.1× plain decoding"),
        (1.0, "came as drafts, which cost what they gave: 1.0× plain decoding"),
        (0.9, "came as drafts, which cost more than they gave: 0.9× plain decoding"),
    ],
)
def test_a_headline_says_what_drafts_gave(times: float | None, words: str) -> None:
    found = Gain(tokens=50, drafted=22, per_verification=1.5, times=times)
    assert found.headline == f"44 % of this answer {words}"
    assert found._replace(drafted=0).headline.endswith(
        ", 0.9× plain decoding" if times == 0.9 else "of the whole model"
    )


def test_a_card_holds_any_text_without_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loss = Gain(tokens=50, drafted=22, per_verification=1.5, times=0.8)
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
