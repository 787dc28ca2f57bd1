"""Encoding of prompts and decoding of answers in pieces, with tokenizers built here."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from selfspec.api.request import stop_strings
from selfspec.api.text import TextDecoder, TokenTexts, UntilStop, encode

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

MAT = ("the cat sat on the mat, the end of the thing",) * 5


def byte_level_bpe(texts: Iterable[str] = MAT, size: int = 280) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes, a few merges and `<end>`: a character can take several tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    options: Any = {"vocab_size": size, "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    trainer = trainers.BpeTrainer(special_tokens=["<end>"], show_progress=False, **options)
    backend.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    assert len(tokenizer) <= size
    return tokenizer


def metaspace() -> PreTrainedTokenizerFast:
    """A tokenizer of words with a leading space, which decoding strips from the first word."""
    vocab = {"\u2581hello": 0, "\u2581world": 1, "!": 2, "<end>": 3}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<end>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_level_bpe()


def ids_of(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return cast(list[int], tokenizer(text)["input_ids"])


def pieces(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> list[str]:
    """The text that each token adds, and the rest at the end."""
    decoder = TextDecoder(tokenizer)
    return [*(decoder.push([token]) for token in ids), decoder.push([], last=True)]


MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("template", "prompt", "raw", "text"),
    [
        (TEMPLATE, "the cat?", False, "user: the cat?\nassistant: "),
        (TEMPLATE, MESSAGES, False, "system: be brief\nuser: hi\nassistant: "),
        (TEMPLATE, "the cat", True, "the cat"),
        (None, "the cat", False, "the cat"),
    ],
)
def test_strings_and_messages_go_through_the_chat_template_if_any(
    template: str | None, prompt: Any, raw: bool, text: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    tokenizer.chat_template = template
    assert encode(tokenizer, prompt, raw=raw).tolist() == [ids_of(tokenizer, text)]


TEXTS = [
    "the cat sat on the mat",
    "the \N{GRINNING FACE} na\N{LATIN SMALL LETTER I WITH DIAERESIS}ve \u6f22\u5b57 end",
    "\N{MAN}\N{ZERO WIDTH JOINER}\N{WOMAN}\N{ZERO WIDTH JOINER}\N{BOY} of the \N{BOY}",
    "e\N{COMBINING ACUTE ACCENT}\r\n\ttabs  and   spaces ",
    "a real \N{REPLACEMENT CHARACTER} in the text, \N{REPLACEMENT CHARACTER}",
]
TOKENIZERS = {"bytes": byte_level_bpe(), "words": metaspace()}


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=60)
@given(data=st.data())
def test_blocks_of_any_size_join_to_the_decoded_whole(name: str, data: st.DataObject) -> None:
    """Holds where decoding strips the first space; without a tokenizer the text is empty."""
    tokenizer = TOKENIZERS[name]
    any_ids = st.lists(st.integers(0, len(tokenizer) - 1), max_size=12)
    texts = st.sampled_from(TEXTS).map(partial(ids_of, tokenizer))
    ids = data.draw(any_ids if name == "words" else any_ids | texts)
    decoder, mute, rest, text = TextDecoder(tokenizer), TextDecoder(None), ids, ""
    while rest:
        size = data.draw(st.integers(0, 5))
        text += decoder.push(rest[:size])
        assert mute.push(rest[:size], last=True) == ""
        rest = rest[size:]
    assert text + decoder.push([], last=True) == tokenizer.decode(ids, skip_special_tokens=True)


def test_a_character_waits_for_its_last_byte_or_the_end(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = ids_of(tokenizer, "a\N{GRINNING FACE}b")
    assert pieces(tokenizer, ids) == ["a", "", "", "", "\N{GRINNING FACE}", "b", ""]
    half = ids[1:3] + ids_of(tokenizer, "b")
    assert pieces(tokenizer, half) == ["", "", "\N{REPLACEMENT CHARACTER}b", ""]
    assert pieces(tokenizer, ids[:3]) == ["a", "", "", "\N{REPLACEMENT CHARACTER}"]
    assert "".join(pieces(tokenizer, ids[:3])) == tokenizer.decode(ids[:3])
    end = cast(int, tokenizer.eos_token_id)  # special tokens are left out
    assert "".join(pieces(tokenizer, [ids[0], end, ids[-1], end])) == "ab"


def test_a_long_answer_is_not_decoded_again_for_each_token(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "decode", decode := Mock(wraps=tokenizer.decode))
    ids = ids_of(tokenizer, "the cat sat on the mat, " * 30)
    assert len(ids) > 100
    assert "".join(pieces(tokenizer, ids)) == "the cat sat on the mat, " * 30
    assert max(len(call.args[0]) for call in decode.call_args_list) <= 4


def test_texts_of_single_tokens_join_to_the_whole(tokenizer: PreTrainedTokenizerFast) -> None:
    """Includes special tokens. The last token of a character shows it."""
    texts, words, mute = TokenTexts(tokenizer), TokenTexts(metaspace()), TokenTexts(None)
    for text in ("the cat", "the \N{GRINNING FACE} end<end>", "", "né<end>the"):
        assert "".join(texts.pieces(ids_of(tokenizer, text))) == text
    ids = ids_of(tokenizer, "\N{GRINNING FACE}")
    assert texts.pieces(ids) == ["", "", "", "\N{GRINNING FACE}"]
    assert texts.pieces(ids[:2]) == ["", "\N{REPLACEMENT CHARACTER}"]
    assert texts.of(ids[0]) == "\N{REPLACEMENT CHARACTER}"
    assert metaspace().decode([1]) == "world"  # its leading space is stripped
    assert [*map(words.of, (1, 2, 3))] == [" world", "!", "<end>"]
    assert (mute.of(3), mute.pieces([3, 12])) == ("<3>", ["<3>", "<12>"])
    decoder = TextDecoder(metaspace())
    assert [decoder.push([2], last=True), decoder.push([1])] == ["!", " world"]


SHORT = st.text("abc", max_size=4)


@given(st.lists(SHORT, max_size=12), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_pieces_join_to_the_text_before_the_first_stop(pieces: list[str], stops: list[str]) -> None:
    until = UntilStop(stops)
    output = "".join([until.push(piece) for piece in pieces] + [until.push("", last=True)])
    text, ended = "", False
    for piece in pieces:
        text += piece
        if ended := any(stop in text for stop in stops):
            text = text[: min(text.find(stop) for stop in stops if stop in text)]
            break
    assert output == text
    assert until.has_stopped is ended


def test_a_stop_is_found_in_a_token_that_was_added_later(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    for count in range(2):
        stop, ids = stop_strings(tokenizer, "<later>"), torch.tensor([[len(tokenizer) - 1]])
        assert bool(stop(ids, None)) == (count == 1)
        tokenizer.add_tokens(["<later>"])


def test_only_text_that_may_begin_a_stop_is_held_back() -> None:
    until = UntilStop(["END", "\n\n"])
    assert until.push("one\n") == "one"
    assert until.push("two E") == "\ntwo "
    assert until.push("N") == ""
    assert until.push("ough") == "ENough"
    assert until.push(" END of it") == " "
    assert until.push("more") == ""
    assert until.push("", last=True) == ""
