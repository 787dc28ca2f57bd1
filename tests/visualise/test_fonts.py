"""Whatever a text holds, something is drawn, and it fits."""

from __future__ import annotations

import pytest

from selfspec.visualise import fonts
from selfspec.visualise.fonts import drawable, families, fitting


def test_the_font_of_matplotlib_itself_comes_first() -> None:
    assert families()[0] == "DejaVu Sans Mono"
    assert families("DejaVu Sans")[:2] == ["DejaVu Sans", "DejaVu Sans Mono"]
    assert drawable("aä␣⏎…") == "aä␣⏎…"


def test_characters_without_a_glyph_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fonts, "_glyphs", lambda: frozenset(map(ord, "abc")))
    assert drawable("a你🎉") == "aU+4F60U+1F389"


@pytest.mark.parametrize(
    ("text", "columns", "shown"),
    [("abcdef", 6, "abcdef"), ("abcdefg", 6, "abcde…"), ("你好世界", 6, "你好…"), ("", 3, "")],
)
def test_wide_characters_count_twice(text: str, columns: int, shown: str) -> None:
    assert fitting(text, columns) == shown
