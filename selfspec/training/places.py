"""Where conversations lie: a file, or a data set of the hub. Imports no torch.

Comes in: what `--data` and the like name. Goes out: the file, opened, or InvalidData. Called by
`text`, and by the commands before anything long begins.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from selfspec.errors import InvalidData
from selfspec.files import local_path
from selfspec.hub.models import HUB_ID

_FILE_SUFFIXES = (".jsonl", ".json", ".gz", ".txt")


def check_source(source: str | Path) -> None:
    """Raise InvalidData for a file that cannot be read, before anything long begins."""
    if (path := file_of(source)) is not None:
        with opened(path):
            pass


def file_of(source: str | Path) -> Path | None:
    """The file that a source names; None: it is a data set. Raises InvalidData for odd names."""
    path = local_path(source)
    known_suffix = path.name.endswith(_FILE_SUFFIXES)
    try:
        named = path.exists() or known_suffix or not HUB_ID.fullmatch(str(source))
        return None if path.is_dir() or not named else path
    except (OSError, ValueError) as error:  # a name too long, a zero byte
        reason = getattr(error, "strerror", None) or error
        raise InvalidData(f"cannot read {str(path)!r}: {reason}") from error


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """The bytes of a file, unpacked.

    Raises InvalidData for what is no file, cannot be read, or is damaged further on.
    """
    opener: Any = gzip.open if path.suffix == ".gz" else open
    try:
        if path.exists() and not path.is_file():
            raise InvalidData(f"cannot read {path}: it is a device or a pipe, expected a file")
        with opener(path, "rb") as file:
            yield file
    except (OSError, EOFError, zlib.error, ValueError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise InvalidData(f"cannot read {path}: {reason}") from error
