from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from selfspec.errors import InvalidData
from selfspec.training.selfgen import Given, talk_of, write
from selfspec.training.text import Counts, Reader, Writer
from tests.authors import at_once, make_author, prompt_ids, read
from tests.talks import make_tokenizer

QUESTIONS = ["a", "b", "c", "a b", "A  b", "b a", "c c", "a c", "b c", "c a b"]


def said(*texts: str) -> list[dict[str, str]]:
    """Turns of user and assistant by turns."""
    return [
        {"role": ("user", "assistant")[number % 2], "content": text}
        for number, text in enumerate(texts)
    ]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Ten questions, one of them twice, and a bad line."""
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps({"messages": said(text, "b")}) for text in QUESTIONS]
    path.write_text("\n".join(["[]", *lines]) + "\n")
    return path


def answer(rows: Path, output: Path, ahead: int = 1, **options: Any) -> Counts:
    author = make_author(**{"batch_size": 4, "greedy_share": 1.0} | options)
    parse = partial(talk_of, tokenizer=make_tokenizer(), system=author.options.system)
    writer = Writer(output, {}, {})
    reader = Reader(rows, parse, skip_bad_rows=True)
    source = Given(reader, writer.batches, author.options)
    for _ in write(source, writer, author.options, at_once(author.answer), ahead):
        pass
    return writer.counts


# --- answers of the model's own


def test_questions_stay_and_answers_are_the_models(rows: Path, tmp_path: Path) -> None:
    counts = answer(rows, tmp_path / "out")
    lines = read(tmp_path / "out")
    kept = [text for text in QUESTIONS if text != "A  b"]
    asked = [line["messages"][0]["content"] for line in lines]
    assert asked == [text for text in kept if text in asked]
    assert counts.total("rows") == len(lines) == len(kept) - counts.total("empty")
    assert (counts.total("duplicates"), counts.total("bad_rows")) == (1, 1)
    assert [line["messages"][1]["content"] for line in lines] != ["b"] * len(lines)
    assert not any(line["sampled"] for line in lines)


def test_every_user_turn_is_answered_in_its_place(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"turns": ["a", "b", "c"]}))
    answer(path, tmp_path / "out", system="c c", max_new_tokens=30)
    (line,) = read(tmp_path / "out")
    roles = [message["role"] for message in line["messages"]]
    asked = [m["content"] for m in line["messages"] if m["role"] == "user"]
    assert roles == ["system", *["user", "assistant"] * len(asked)]
    assert asked == ["a", "b", "c"][: len(asked)]
    assert line["messages"][0]["content"] == "c c"


def test_rows_too_long_for_the_model_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in ("a " * 250, "a")))
    counts = answer(path, tmp_path / "out")
    assert (counts.total("too_long"), counts.total("rows") + counts.total("empty")) == (1, 1)


def test_some_rows_are_sampled_if_asked_for(rows: Path, tmp_path: Path) -> None:
    answer(rows, tmp_path / "out", greedy_share=0.5)
    assert {line["sampled"] for line in read(tmp_path / "out")} == {True, False}


def test_a_rows_own_system_message_wins(tokenizer: PreTrainedTokenizerBase) -> None:
    system = {"role": "system", "content": "b"}
    own = talk_of({"messages": [system, *said("a", "c", "b")]}, tokenizer, "c")
    assert own.messages == [system]
    assert (own.question, own.pending) == ("a", ["b"])
    given = talk_of({"messages": said(" a ")}, tokenizer, "c")
    assert given.messages == [{"role": "system", "content": "c"}]
    assert given.prompt == prompt_ids(tokenizer, [*given.messages, *said("a")])


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"text": "a b"}, "holds text, expected messages, conversations or turns"),
        ({"messages": [{"role": "system", "content": "a"}]}, "no user turn"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "no user turn"),
        ({"messages": said("a", "b", " ")}, "an empty user turn"),
        ({"messages": [*said("a"), {"role": "system", "content": "a"}]}, "behind its first turn"),
    ],
)
def test_a_row_without_questions_is_refused(
    record: dict[str, Any], reason: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    with pytest.raises(InvalidData, match=reason):
        talk_of(record, tokenizer, None)


def test_a_run_that_is_broken_off_is_continued_with_the_next_rows(
    rows: Path, tmp_path: Path
) -> None:
    expected = answer(rows, tmp_path / "whole")
    for tokens in (1, 12, None):
        counts = answer(rows, tmp_path / "parts", ahead=3, tokens=tokens)
    assert (tmp_path / "parts").read_bytes() == (tmp_path / "whole").read_bytes()
    assert counts == expected
