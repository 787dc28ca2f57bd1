"""Reads small files from outside with bounds, so that none can hang, fill memory or surprise.

Comes in: a path. Goes out: text, or plain values of JSON and YAML. A file that is too large, too
deep, or expands to too much (YAML's aliases) is refused before it is built. Called by everything
that reads configs, records and lists; weights have a check of their headers here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from selfspec.errors import InvalidData

MOST_BYTES = 64 << 20
"""Of a text file that is read as a whole."""


def read_text(path: Path, most_bytes: int = MOST_BYTES) -> str:
    """A UTF-8 file as a whole. Raises InvalidData: unreadable, too large, or not UTF-8."""
    try:
        if not path.is_file():
            raise InvalidData(f"{path} is {'no file' if path.exists() else 'not there'}")
        with path.open("rb") as file:
            data = file.read(most_bytes + 1)
        if len(data) > most_bytes:
            raise InvalidData(f"{path} has more than {most_bytes} bytes, the most that is read")
        return data.decode("utf-8")
    except OSError as error:
        raise InvalidData(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidData(f"{path} is not UTF-8: byte {error.start} is wrong") from error


def read_json(path: Path, most_bytes: int = MOST_BYTES) -> Any:
    """Plain values. Raises InvalidData: as `read_text`, not JSON, or nested too deeply."""
    return parse_json(read_text(path, most_bytes), str(path))


def parse_json(text: str, where: str) -> Any:
    """Plain values; `where` names the text in errors. Raises InvalidData."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise InvalidData(f"{where} is nested too deeply") from error
    except ValueError as error:
        raise InvalidData(f"{where} is not JSON: {error}") from error
