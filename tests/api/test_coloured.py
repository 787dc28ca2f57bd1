"""An answer in a notebook: coloured by who gave each token, text unchanged, shown as it comes."""

from __future__ import annotations

import re
import sys
from html import unescape
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from selfspec.api.coloured import Piece, html
from selfspec.api.givers import Giver
from selfspec.api.speculator import Speculator
from selfspec.api.stream import Generation
from selfspec.errors import InvalidPrompt
from tests.bad_calls import small_model, speaking


@pytest.fixture(scope="module")
def speculator() -> Speculator:
    return speaking(small_model())


def text_of(shown: str) -> str:
    """What a reader sees of the answer itself."""
    (body,) = re.findall(r"pre-wrap[^>]*>(.*?)</div>", shown, re.DOTALL)
    return unescape(re.sub(r"<[^>]*>", "", body))


def test_pieces_join_to_the_text_and_say_who_gave_them(speculator: Speculator) -> None:
    answer = speculator.generate("the cat", max_new_tokens=24, do_sample=False)
    assert "".join(piece.text for piece in answer.pieces) == answer.text
    assert len(answer.pieces) == len(answer.token_ids)
    drafted = [piece for piece in answer.pieces if piece.giver.source != "model"]
    assert len(drafted) == answer.stats.accepted
    assert text_of(answer._repr_html_()) == answer.text


def test_text_is_only_ever_text_and_each_giver_has_its_look() -> None:
    pieces = [
        Piece("<script>alert(1)</script>", Giver("exit")),
        Piece(" & ", Giver("ngram")),
        Piece('"\n', Giver("grammar")),
        Piece("<b>", Giver("model")),
    ]
    text = "".join(piece.text for piece in pieces)
    shown = html(text, pieces, 6, "1 < 2")
    assert text_of(shown) == text
    assert not re.search("<script|<b>|1 < 2", shown)
    assert {"solid", "dotted", "dashed"} <= set(re.findall(r"underline 2px (\w+)", shown))
    assert "the embedding" in shown


def test_an_error_shows_the_callers_lines_and_its_sentence(speculator: Speculator) -> None:
    with pytest.raises(InvalidPrompt) as caught:
        speculator.generate(["the cat", "the mat"])  # type: ignore[arg-type]  # the mistake
    *lines, sentence = caught.value._render_traceback_()
    assert sentence == f"InvalidPrompt: {caught.value}"
    assert 'speculator.generate(["the cat", "the mat"])' in lines[1]
    assert not any("selfspec/api/" in line for line in lines)


class Notebook(SimpleNamespace):
    """What a cell shows, time by time."""

    def __init__(self) -> None:
        self.shown: list[str] = []
        self.display = SimpleNamespace(display=lambda answer, display_id: self.updating(answer))
        self.get_ipython = lambda: SimpleNamespace(kernel=True)

    def updating(self, answer: Generation) -> Any:
        """One place in the page."""
        self.shown.append(answer.text)
        return SimpleNamespace(update=lambda newer: self.shown.append(newer.text))


def test_a_stream_shows_itself_as_it_comes(
    speculator: Speculator, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options: Any = {"max_new_tokens": 12, "do_sample": False}
    text = speculator.generate("the cat", **options).text
    stream = speculator.stream("the cat", **options)
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    stream.show()
    assert capsys.readouterr().out == f"{text}\n"
    assert stream.result.text == text
    page = Notebook()
    monkeypatch.setitem(sys.modules, "IPython", page)
    speculator.stream("the cat", **options).show()
    assert page.shown[-1] == text
    assert len(page.shown) > 2
    assert all(newer.startswith(older) for older, newer in pairwise(page.shown))
