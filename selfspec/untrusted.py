"""Reads files from outside with bounds, so that none can hang, fill memory or surprise.

A file that is too large, too deep, or has aliases (a few lines of them stand for billions of
values) is refused before it is built. GGUF files: `hub/gguf.py`.
"""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from selfspec.errors import InvalidData

MOST_BYTES = 64 << 20
"""Limit for a text file that is read as a whole."""

MOST_LINE_BYTES = 16 << 20
"""Limit for one line of a JSONL file."""

MOST_DEPTH = 64
"""Lists and mappings inside each other."""

MOST_YAML_BYTES = 1 << 20
"""A config has a few hundred; YAML is read a hundred times as slowly as JSON."""

MOST_HEADER_BYTES = 16 << 20
"""Limit for a safetensors file's header: a model of 100,000 tensors stays below."""

_MOST_YAML_WORD = 10_000
"""Characters of a plain scalar: numbers with colons take quadratic time."""


def open_bytes(path: Path) -> IO[bytes]:
    """A file, or a pipe that somebody writes to. Raises InvalidData for a folder, device, nothing.

    Never waits for somebody to open the other end of a pipe: such a pipe is empty.
    """
    try:
        number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        raise InvalidData(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:  # a zero byte in the name
        raise InvalidData(f"cannot read {str(path)!r}: {error}") from error
    mode = os.fstat(number).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
        os.close(number)
        raise InvalidData(f"{path} is {'a folder' if stat.S_ISDIR(mode) else 'a device'}, no file")
    os.set_blocking(number, True)
    return os.fdopen(number, "rb")


_PIECE = 1 << 24


def read_bytes(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """A file as a whole. Raises InvalidData: unreadable, or too large."""
    with open_bytes(path) as file:
        try:
            data = b""  # in pieces: a read of a gigabyte gets a buffer of it at once
            while len(data) <= most_bytes and (piece := file.read(min(_PIECE, most_bytes + 1))):
                data += piece
        except OSError as error:
            raise InvalidData(f"cannot read {path}: {error.strerror}") from error
    if len(data) > most_bytes:
        raise InvalidData(f"{path} has more than {most_bytes} bytes, the most that is read")
    return data


def read_text(path: Path, most_bytes: int = MOST_BYTES) -> str:
    """A UTF-8 file as a whole, without a byte order mark. Raises InvalidData for any other."""
    try:
        return read_bytes(path, most_bytes).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidData(f"{path} is not UTF-8: byte {error.start} is wrong") from error


# --- JSON -----------------------------------------------------------------------------------------


def read_json(path: Path, most_bytes: int = MOST_BYTES) -> Any:
    """Plain values. Raises InvalidData: as `read_text`, not JSON, or nested too deeply."""
    return parse_json(read_text(path, most_bytes), str(path))


def parse_json(text: str, where: str) -> Any:
    """Plain values; `where` names the text in errors.

    Raises InvalidData: not JSON, nested too deeply, or text with half a character.
    """
    try:
        value = json.loads(text)
        if text.count("[") + text.count("{") > MOST_DEPTH and _depth(value) > MOST_DEPTH:
            raise InvalidData(f"{where} is nested too deeply")
        if "\\ud" in text or "\\uD" in text:  # else no string can hold a lone surrogate
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError as error:
        raise InvalidData(f"{where} is nested too deeply") from error
    except UnicodeEncodeError as error:
        raise InvalidData(f"{where} holds half a character, a lone surrogate") from error
    except ValueError as error:
        raise InvalidData(f"{where} is not JSON: {error}") from error
    return value


def json_lines(
    path: Path, most_line_bytes: int = MOST_LINE_BYTES, most_lines: int | None = None
) -> Iterator[tuple[int, str]]:
    """Number, from 1, and text of each line that is not blank, one in memory at a time.

    Only a line feed ends a line. Raises InvalidData: unreadable, not UTF-8, a line too long, or
    too many lines.
    """
    with open_bytes(path) as file:
        for number in range(1, (most_lines or 2**62) + 2):
            try:
                data = file.readline(most_line_bytes + 1)
                line = data.decode("utf-8-sig" if number == 1 else "utf-8")
            except OSError as error:
                raise InvalidData(f"cannot read {path}: {error.strerror}") from error
            except UnicodeDecodeError as error:
                raise InvalidData(f"{path}, line {number} is not UTF-8") from error
            if not data:
                return
            if len(data) > most_line_bytes:
                raise InvalidData(f"{path}, line {number} has more than {most_line_bytes} bytes")
            if number == most_lines:
                raise InvalidData(f"{path} has {most_lines} lines or more, fewer are read")
            if line.strip():
                yield number, line.removesuffix("\n")


def _depth(value: dict[Any, Any] | list[Any] | str | float | None) -> int:
    """Lists and mappings inside each other."""
    if not isinstance(value, dict | list):
        return 0
    inner = value.values() if isinstance(value, dict) else value
    return 1 + max((_depth(one) for one in inner if isinstance(one, dict | list)), default=0)


# --- YAML -----------------------------------------------------------------------------------------


def read_yaml(path: Path) -> Any:
    """Plain values; None for an empty file.

    Raises InvalidData: as `read_text`, not YAML, nested too deeply, with an alias, or a key twice.
    """
    import yaml

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # the fast one, if it is there
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
            if keys and (most := keys.most_common(1)[0])[1] > 1:
                raise InvalidData(f"{path} has the key {most[0]!r} twice")
            found: dict[Any, Any] = super().construct_mapping(node, deep)
            return found

    text = read_text(path, MOST_YAML_BYTES)
    depth = 0
    try:
        for event in yaml.parse(text, Loader=Loader):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > MOST_DEPTH:
                raise InvalidData(f"{path} is nested too deeply")
            if isinstance(event, yaml.AliasEvent):
                raise InvalidData(f"{path} has the alias *{event.anchor}. Write out its value")
            word = event.value if isinstance(event, yaml.ScalarEvent) and event.implicit[0] else ""
            if len(word) > _MOST_YAML_WORD:
                raise InvalidData(f"{path} has a word of more than {_MOST_YAML_WORD} characters")
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise InvalidData(f"{path} is not YAML: {error}") from error
    except (ValueError, OverflowError, TypeError, LookupError, AttributeError) as error:
        # a date, number or tag that looks like one and is none: PyYAML passes these through
        raise InvalidData(f"{path} holds a value that YAML cannot read: {error}") from error


# --- weights --------------------------------------------------------------------------------------


def check_safetensors(path: Path) -> dict[str, tuple[str, list[int]]]:
    """Types, as the format calls them, and shapes by name. Raises InvalidData for damaged files.

    The library itself checks names, shapes, types and places against the file's size; headers of
    up to 100 MB, which it takes half a minute to read, are refused here.
    """
    from safetensors import SafetensorError, safe_open

    with open_bytes(path) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise InvalidData(f"{path} is a pipe, expected a file of tensors")
        size = int.from_bytes(file.read(8), "little")
    if size > MOST_HEADER_BYTES:
        raise InvalidData(
            f"{path} is no file of tensors: it says that its header has {size} bytes, more than "
            f"{MOST_HEADER_BYTES}"
        )
    try:
        with safe_open(path, "numpy") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  # a file, no dict
            return {name: (one.get_dtype(), one.get_shape()) for name, one in slices.items()}
    except (SafetensorError, OSError) as error:
        raise InvalidData(f"{path} is no whole file of tensors: {error}") from error
