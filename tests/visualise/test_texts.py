"""Single tokens as text: spaces stay, texts join, and nothing invisible is left."""

from __future__ import annotations

import pytest

from selfspec.visualise.layers import visible
from selfspec.visualise.look import PART_OF_CHARACTER, TokenTexts
from tests.api.test_text import byte_level_bpe, ids_of, metaspace


@pytest.mark.parametrize("text", ["the cat", "the 🎉 end<end>", "", "né<end>the"])
def test_pieces_join_to_the_whole_with_special_tokens(text: str) -> None:
    tokenizer = byte_level_bpe()
    assert "".join(TokenTexts(tokenizer).pieces(ids_of(tokenizer, text))) == text


def test_a_character_of_several_tokens_is_shown_by_the_last() -> None:
    tokenizer = byte_level_bpe()
    ids = ids_of(tokenizer, "🎉")
    texts = TokenTexts(tokenizer)
    assert texts.pieces(ids) == ["", "", "", "🎉"]
    assert texts.pieces(ids[:2]) == ["", PART_OF_CHARACTER]
    assert texts.of(ids[0]) == PART_OF_CHARACTER


def test_a_word_keeps_the_space_that_opens_it() -> None:
    """Decoded alone it would lose it."""
    tokenizer = metaspace()
    assert tokenizer.decode([1]) == "world"
    assert [TokenTexts(tokenizer).of(token) for token in (1, 2, 3)] == [" world", "!", "<end>"]


def test_without_a_tokenizer_ids_stand_for_texts() -> None:
    texts = TokenTexts(None)
    assert (texts.of(3), texts.pieces([3, 12])) == ("<3>", ["<3>", "<12>"])


def test_a_long_text_is_cut() -> None:
    assert visible("a long text", 6) == "a␣lon…"
    assert visible("short", 5) == "short"


@pytest.mark.parametrize(
    ("text", "shown"),
    [(" a\n", "␣a⏎"), ("", "∅"), ("\t\x1b", "⇥\\u001b"), ("\u2028", "\\u2028"), ("é你", "é你")],
)
def test_what_cannot_be_seen_is_shown(text: str, shown: str) -> None:
    assert visible(text) == shown
