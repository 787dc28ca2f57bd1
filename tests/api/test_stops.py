"""Text up to a stop, as a stream shows it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfspec.api.stops import UntilStop

SHORT = st.text("abc", max_size=4)


@given(st.lists(SHORT, max_size=12), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_pieces_join_to_the_text_before_the_first_stop(pieces: list[str], stops: list[str]) -> None:
    until = UntilStop(stops)
    shown = "".join([until.push(piece) for piece in pieces] + [until.push("", last=True)])
    text, ended = "", False
    for piece in pieces:
        text += piece
        if ended := any(stop in text for stop in stops):
            text = text[: min(text.find(stop) for stop in stops if stop in text)]
            break
    assert shown == text
    assert until.found is ended


def test_what_may_begin_a_stop_is_held_back_and_no_more() -> None:
    until = UntilStop(["END", "\n\n"])
    assert until.push("one\n") == "one"
    assert until.push("two E") == "\ntwo "
    assert until.push("N") == ""
    assert until.push("ough") == "ENough"
    assert until.push(" END of it") == " "
    assert until.push("more") == ""
    assert until.push("", last=True) == ""


@pytest.mark.parametrize("last", ["E", "EN", "\n"])
def test_the_end_gives_up_what_was_held_back(last: str) -> None:
    until = UntilStop(["END", "\n\n"])
    assert until.push(f"a{last}") == "a"
    assert until.push("", last=True) == last
    assert not until.found
