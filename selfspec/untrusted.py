"""Reads files from outside with bounds, so that none can hang, fill memory or surprise.

Comes in: a path. Goes out: text, or plain values of JSON and YAML. A file that is too large, too
deep, or expands to too much (YAML's aliases) is refused before it is built. Called by everything
that reads configs, records, lists and weights (GGUF files: `hub/gguf.py`).
"""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from selfspec.errors import InvalidData

if TYPE_CHECKING:
    import yaml

MOST_BYTES = 64 << 20
"""Of a text file that is read as a whole."""

MOST_LINE_BYTES = 16 << 20
"""Of one line of a JSONL file."""

MOST_DEPTH = 64
"""Lists and mappings inside each other."""

MOST_YAML_BYTES = 1 << 20
"""A config has a few hundred; YAML is read a hundred times as slowly as JSON."""

MOST_YAML_NODES = 100_000
"""Values in a YAML file, each alias counted with all that it stands for."""

MOST_HEADER_BYTES = 16 << 20
"""Of a safetensors file: a model of 100,000 tensors stays below."""

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
            data = b""  # in pieces: whoever asks for a gigabyte gets a buffer of it at once
            while len(data) <= most_bytes and (piece := file.read(min(_PIECE, most_bytes + 1))):
                data += piece
        except OSError as error:
            raise InvalidData(f"cannot read {path}: {error.strerror}") from error
    if len(data) > most_bytes:
        raise InvalidData(f"{path} has more than {most_bytes} bytes, the most that is read")
    return data


def read_text(path: Path, most_bytes: int = MOST_BYTES) -> str:
    """A UTF-8 file as a whole, without a byte order mark.

    Raises InvalidData: unreadable, too large, or not UTF-8.
    """
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
        if text.count("[") + text.count("{") > MOST_DEPTH:
            _require_shallow(value, where)
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


def _require_shallow(value: Any, where: str) -> None:
    """Raise InvalidData for values nested deeper than MOST_DEPTH."""
    level: list[Any] = [value]
    for _ in range(MOST_DEPTH + 1):
        inner = [_values(entry) for entry in level if isinstance(entry, dict | list)]
        level = [entry for values in inner for entry in values if isinstance(entry, dict | list)]
        if not level:
            return
    raise InvalidData(f"{where} is nested too deeply")


def _values(container: dict[Any, Any] | list[Any]) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container


# --- YAML -----------------------------------------------------------------------------------------


def read_yaml(path: Path) -> Any:
    """Plain values; None for an empty file.

    Raises InvalidData: as `read_text`, not YAML, a key twice, nested too deeply, or aliases that
    stand for too much. All that is found from the events, before a value is built.
    """
    import yaml

    text = read_text(path, MOST_YAML_BYTES)
    kind = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        _require_small(yaml.parse(text, Loader=kind), path)
        loader = kind(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _require_single_keys(node, path)
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        raise InvalidData(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    except (ValueError, OverflowError, TypeError, LookupError, AttributeError) as error:
        # a date, number or tag that looks like one and is none: PyYAML passes these through
        words = " ".join(str(error).split())
        raise InvalidData(f"{path} holds a value that YAML cannot read: {words}") from error


def _require_small(events: Iterable[yaml.Event], path: Path) -> None:
    """Raise InvalidData unless what the events build is shallow, and small with aliases expanded.

    `around` holds, for each list and mapping around the event, its anchor and the values so far.
    """
    import yaml

    sizes: dict[str | None, int] = {}
    around: list[tuple[str | None, int]] = []
    total = 0
    for event in events:
        if isinstance(event, yaml.CollectionStartEvent):
            if len(around) >= MOST_DEPTH:
                raise InvalidData(f"{path} is nested too deeply")
            around.append((event.anchor, total))
            total += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = around.pop()
            sizes[anchor] = total - before
        elif isinstance(event, yaml.NodeEvent):
            total += _expanded(event, sizes, path)
        if total > MOST_YAML_NODES:
            raise InvalidData(f"{path} expands to more than {MOST_YAML_NODES} values")


def _expanded(event: yaml.NodeEvent, sizes: dict[str | None, int], path: Path) -> int:
    """Values that a scalar or an alias stands for; notes the scalar's anchor in `sizes`."""
    import yaml

    if isinstance(event, yaml.AliasEvent):
        if event.anchor not in sizes:
            raise InvalidData(f"{path}: the alias *{event.anchor} stands for nothing finished")
        return sizes[event.anchor]
    plain = event.value if isinstance(event, yaml.ScalarEvent) and event.implicit[0] else ""
    if len(plain) > _MOST_YAML_WORD:
        raise InvalidData(f"{path} has a word of more than {_MOST_YAML_WORD} characters")
    sizes[event.anchor] = 1
    return 1


def _require_single_keys(root: yaml.Node, path: Path) -> None:
    """Raise InvalidData for a mapping that has a key twice: one of the values would be lost."""
    import yaml

    waiting, seen = [root], {id(root)}
    while waiting:
        node = waiting.pop()
        inner: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
            if keys and (most := keys.most_common(1)[0])[1] > 1:
                raise InvalidData(f"{path} has the key {most[0]!r} twice")
            inner = [entry for pair in node.value for entry in pair]
        elif isinstance(node, yaml.SequenceNode):
            inner = node.value
        fresh = [entry for entry in inner if id(entry) not in seen]
        seen.update(map(id, fresh))
        waiting += fresh


# --- weights --------------------------------------------------------------------------------------


def check_safetensors(path: Path) -> dict[str, tuple[str, list[int]]]:
    """Types, as the format calls them, and shapes by name.

    Raises InvalidData unless the file is whole, its header small.

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
        words = " ".join(str(error).split())
        raise InvalidData(f"{path} is no whole file of tensors: {words}") from error
