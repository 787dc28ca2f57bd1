"""Conversations from anywhere, and the record of a file that `data` writes.

Each damaged one is one line that names the file; none is a traceback, and none is changed.
"""

# mypy: disable-error-code="var-annotated"
# mixed values in a row, for which mypy finds no common type

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from selfspec.errors import (
    InvalidData,
    InvalidOption,
)
from selfspec.training import text
from selfspec.training.selfgen import Writer
from selfspec.training.text import Conversation, read_conversations
from tests.authors import counted
from tests.bad_input import DEEP, one_line, snapshot
from tests.models import VOCAB_SIZE
from tests.talks import make_tokenizer

# --- conversations --------------------------------------------------------------------------------

IDS = {"input_ids": [1, 2, 3], "answer_start": 1}
USER, ASSISTANT = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}

ROWS: list[Any] = [
    *(3, None, True, "text", [], [IDS], {}, {"other": 1}),
    *({"input_ids": value, "answer_start": 1} for value in (None, 3, "12", {}, ["1", "2"])),
    *({"input_ids": value, "answer_start": 1} for value in ([1.0, 2.0], [True, True], [[1], [2]])),
    *({"input_ids": value, "answer_start": 1} for value in ([1, -1], [1, 96], [1, 10**40], [])),
    *({"input_ids": [1, 2, 3], "answer_start": value} for value in (None, "1", 0, 3, -1, 1.0)),
    *(
        {"input_ids": [1, 2, 3], "answers": value}
        for value in (None, 3, "ab", [1], [[1]], [[1, 9]])
    ),
    *({"input_ids": [1, 2, 3], "loss_mask": value} for value in (None, 1, [0, 1], ["a"] * 3)),
    *({"input_ids": [1, 2, 3], "answers": value} for value in ([[2, 1]], [["1", "2"]], [[0, 1]])),
    *({"input_ids": [1, 2, 3], "answers": value} for value in ([[1, 3], [2, 3]], [[1, 9]])),
    {"input_ids": [1] * 500, "answer_start": 1},
    *({"messages": value} for value in (None, 3, "hi", {}, [], [3], [None], [[]], [{}])),
    *({"messages": [USER, value]} for value in ({"role": "assistant"}, {"content": "b"})),
    *({"messages": [USER, ASSISTANT | {"role": value}]} for value in (None, 3, [], "robot")),
    *({"messages": [USER, ASSISTANT | {"content": value}]} for value in (None, 3, [], {})),
    {"messages": [USER, ASSISTANT | {"content": "\ud800"}]},
    {"messages": [ASSISTANT]},
    *({"conversations": value} for value in (None, 3, [], [3], [{"from": "human"}])),
    {"conversations": [{"from": "robot", "value": "a"}]},
    *({"turns": value} for value in (None, [], ["a"], [3])),
    *({"text": value} for value in (None, 3, [], "", "a", "\udfff a b")),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: json.dumps(row)[:40])
def test_a_strange_conversation_names_file_and_line(tmp_path: Path, row: Any) -> None:
    path = tmp_path / "talks.jsonl"
    path.write_text(json.dumps(IDS) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(InvalidData, match="line 2") as caught:
        read_talks(path)
    one_line(caught, path)
    assert len(read_talks(path, skip=True)) == 1


def read_talks(path: Path, *, skip: bool = False) -> list[Conversation]:
    return read_conversations(
        path, make_tokenizer(), vocab_size=VOCAB_SIZE, max_length=100, skip_bad_rows=skip
    )


LINE = json.dumps(IDS).encode() + b"\n"

CONTENTS: dict[str, tuple[str, bytes]] = {
    "empty": ("a.jsonl", b""),
    "blank": ("a.jsonl", b"\n \n\t\n"),
    "zero bytes": ("a.jsonl", bytes(100)),
    "utf-16": ("a.jsonl", '{"text": "a"}'.encode("utf-16")),
    "latin": ("a.jsonl", b'{"text": "\xe9 a b c"}\n'),
    "deep": ("a.jsonl", DEEP.encode()),
    "deep array": ("a.json", DEEP.encode()),
    "half a line": ("a.jsonl", LINE + LINE[:9]),
    "array of numbers": ("a.json", b"[1, 2]"),
    "array without end": ("a.json", b"[" + LINE),
    "array and more": ("a.json", b"[] []"),
    "huge number": ("a.jsonl", b'{"input_ids": [1, ' + b"9" * 6000 + b'], "answer_start": 1}'),
    "a long line": ("a.jsonl", b'"' + bytes(9000)),
    "long blank": ("a.jsonl", b" \n" * 6000),
    "no gzip": ("a.jsonl.gz", LINE),
    "half a gzip": ("a.jsonl.gz", gzip.compress(LINE * 99)[:40]),
    "damaged gzip": ("a.jsonl.gz", gzip.compress(LINE * 99)[:-9] + bytes(9)),
    "gzip and more": ("a.jsonl.gz", gzip.compress(LINE) + b"more"),
    "a bomb of one line": ("a.jsonl.gz", gzip.compress(b"[" * (1 << 24))),
    "a bomb of blanks": ("a.jsonl.gz", gzip.compress(b"\n" * (1 << 20))),
    "a bomb of an array": ("a.json.gz", gzip.compress(b"[" + b" " * (1 << 24))),
}


@pytest.mark.parametrize("kind", CONTENTS)
def test_a_file_of_conversations_of_other_content(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "_MOST_LINE", 8192)
    monkeypatch.setattr(text, "_MOST_ARRAY", 1 << 16)
    name, content = CONTENTS[kind]
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InvalidData) as caught:
        read_talks(path)
    one_line(caught, path)
    assert path.read_bytes() == content


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz"])
@pytest.mark.parametrize("long", [LINE[:-1] + b" " * 8192, b"{" * 8193, b"x" * 8193, b"x" * 99999])
@pytest.mark.parametrize("place", range(4))
def test_a_line_that_is_too_long_is_a_bad_row(
    tmp_path: Path, place: int, long: bytes, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "_MOST_LINE", 8192)
    lines = [LINE.rstrip()] * 3
    lines.insert(place, long)
    path = tmp_path / name
    content = b"\n".join(lines)
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert len(read_talks(path, skip=True)) == 3
    with pytest.raises(InvalidData, match=f"{name}, line {place + 1} has more than 8192 bytes"):
        read_talks(path)


@pytest.mark.parametrize("kind", ["gone", "a pipe", "a device", "a loop", "a long name"])
def test_what_is_no_file_of_conversations(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.jsonl"
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a device":
        path.symlink_to("/dev/zero")
    elif kind == "a loop":
        path.symlink_to(path)
    elif kind == "a long name":
        path = tmp_path / f"{'a' * 300}.jsonl"
    with pytest.raises((InvalidData, InvalidOption)) as caught:
        read_talks(path)
    one_line(caught, path)


def test_a_mark_in_front_is_no_part_of_the_text(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + LINE)
    assert len(read_talks(path)) == 1


# --- the record of a file that `data` writes ------------------------------------------------------

RECORD_VALUES: list[tuple[str, Any]] = [
    *(("format_version", value) for value in (0, 1, 3, "2", True, None)),
    *(("options", value) for value in (None, [], "a")),
    *(("versions", value) for value in (None, [], 3)),
    *(("counts", value) for value in (None, [], {}, {"families": [1]})),
    ("counts", {"families": {"a": {"rows": 1}}}),
    *(
        ("counts", {"families": {"": counted(rows=1).families[""] | {"answers": value}}})
        for value in ("many", -1, 1.5)
    ),
    *(("seeds", value) for value in (None, 3, ["a"], [-1], [1.0], [10**30], {})),
    *(("bytes", value) for value in (None, "10", -1, 1.0, 10**30, True, [], 3, 10**9)),
    ("more", 1),
]


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
@pytest.mark.parametrize(("name", "value"), RECORD_VALUES, ids=lambda value: repr(value)[:30])
def test_a_strange_record_loses_no_line(tmp_path: Path, name: str, value: Any, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    writer = Writer(path, {}, {})
    writer.append(['{"a": 1}', '{"a": 2}'], 7, counted(rows=2))
    record = path.with_name(path.name + ".run.json")
    record.write_text(json.dumps(json.loads(record.read_text()) | {name: value}))
    before = snapshot(tmp_path)
    with pytest.raises(InvalidData) as caught:
        Writer(path, {}, {})
    one_line(caught, path)
    assert snapshot(tmp_path) == before
