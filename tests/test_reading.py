"""Bounded reading: what is refused, with a line that names the file, and what is read."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from selfspec import files
from selfspec.errors import InvalidData

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 8)}]\n" for n in range(1, 13)
)
"""Nested aliases: 8 to the 13th values."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "file"


def put(file: Path, content: str | bytes) -> Path:
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return file


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (BOMB, r"has the alias \*a0\. Write out its value"),
        ("[" * 10_000, "nest(ed too|ing)"),  # ours, or libyaml's own
        ("a: 1\nb: 2\na: 3", "has the key 'a' twice"),
        ("x: 1" + ":10" * 10_000, "a word of more than"),
        ("a: b\n" * 300_000, "more than 1048576 bytes"),
        *(
            (f"a: {text}", "a value that YAML")
            for text in ("9" * 9000, "!!bool x", "!!timestamp x")
        ),
        *((f"a: {text}", "is not YAML") for text in ("!!python/object/apply:os.getcwd []", "\x00")),
        ("a: 1\n---\nb: 2", "is not YAML"),
        (b"a: \xff", "not UTF-8: byte 3"),
    ],
)
def test_yaml_is_bounded_before_it_is_built(file: Path, content: str | bytes, words: str) -> None:
    with pytest.raises(InvalidData, match=words) as caught:
        files.read_yaml(put(file, content))
    assert "\n" not in str(caught.value)
    assert str(file) in str(caught.value)


def test_plain_yaml_is_read(file: Path) -> None:
    assert files.read_yaml(put(file, "")) is files.read_yaml(put(file, "# nothing\n")) is None
    text = b"\xef\xbb\xbfa: 'text'\nb: |\n  lines\n"
    assert files.read_yaml(put(file, text)) == {"a": "text", "b": "lines\n"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("[" * 65 + "[1]" + "]" * 65, "nested too deeply"),
        ('"\\ud800"', "lone surrogate"),
        ('{"\\uDFFF": 1}', "lone surrogate"),
        ("9" * 9000, "is not JSON"),
    ],
)
def test_json_is_bounded(text: str, words: str) -> None:
    with pytest.raises(InvalidData, match=words):
        files.parse_json(text, "it")


def test_json_within_the_bounds_is_read() -> None:
    wide = [[n] for n in range(1000)]
    text = '{"a": "\\ud83d\\ude00", "b": ' + json.dumps(wide) + "}"
    assert files.parse_json(text, "it") == {"a": "\U0001f600", "b": wide}


def test_lines_come_with_their_numbers_and_without_blank_ones(file: Path) -> None:
    put(file, b'\xef\xbb\xbf1\r\n\n  \n"\xe2\x80\xa8"\n3')
    assert list(files.json_lines(file)) == [(1, "1\r"), (4, '"\u2028"'), (5, "3")]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("1\n" + "2" * 20 + "\n", "line 2 has more than 10 bytes"),
        (b"1\n\xff\n", "line 2 is not UTF-8"),
        ("1\n2\n3\n4\n", "has 4 lines or more"),
    ],
)
def test_lines_are_bounded(file: Path, content: str | bytes, words: str) -> None:
    with pytest.raises(InvalidData, match=words):
        list(files.json_lines(put(file, content), most_line_bytes=10, most_lines=4))


@pytest.mark.parametrize(
    "read", [files.read_text, files.read_json, files.read_yaml, files.json_lines]
)
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("missing", "cannot read .*missing: No such file"),
        (".", "is a folder"),
        ("file/below", "cannot read"),
        ("x" * 5000, "cannot read"),
        ("zero\0byte", "cannot read"),
        ("loop", "cannot read"),
        ("/dev/zero", "is a device"),
    ],
)
def test_what_is_no_file_is_named(tmp_path: Path, read: Any, name: str, words: str) -> None:
    put(tmp_path / "file", "1")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(InvalidData, match=words):
        list(read(tmp_path / name))


def test_a_pipe_is_read_and_one_without_a_writer_is_empty(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "silent")
    assert files.read_text(tmp_path / "silent") == ""
    reader, writer = os.pipe()
    os.write(writer, b"text")
    os.close(writer)
    try:
        assert files.read_text(Path(f"/dev/fd/{reader}")) == "text"
    finally:
        os.close(reader)


def test_only_whole_tensors_behind_a_small_header_are_taken(file: Path) -> None:
    head = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    whole = struct.pack("<Q", len(head)) + head + bytes(8)
    assert files.check_safetensors(put(file, whole)) == {"a": ("F32", [2])}
    long = struct.pack("<Q", files.MOST_HEADER_BYTES + 1) + b"{}"
    for content, words in (
        *((damaged, "no whole file") for damaged in (b"", whole[:-1], whole + b"more")),
        (long, "says that its header has 16777217 bytes"),
    ):
        with pytest.raises(InvalidData, match=words):
            files.check_safetensors(put(file, content))
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(InvalidData, match="is a pipe"):
        files.check_safetensors(file)
