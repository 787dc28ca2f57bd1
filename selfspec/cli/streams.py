"""Standard input, output and error as they may come: closed, full, or with nobody at the end.

`run` repairs them once at the start. What goes to standard error is lost where nobody takes it,
and ends nothing. Imports no torch.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Any, TextIO


def repair() -> None:
    """Give closed streams a place, and let none fail for a character that it cannot show.

    A closed number would be given to the next file that is opened, and then written into.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_WRONLY if number == 2 else os.O_RDONLY)
    sys.stdin = sys.stdin or _text(0, "r")
    sys.stdout = sys.stdout or _text(1, "w")  # not open for writing: the first word says so
    sys.stderr = Forgiving(sys.stderr or _text(2, "w"))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def silence(stream: Any) -> None:
    """Send what is still to come, and what is kept back, nowhere: it would fail again."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


class Forgiving:
    """A text stream whose words are lost where they cannot be written."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """How much was taken: all of it, always."""
        try:
            self._stream.write(text)
        except (OSError, ValueError):
            silence(self._stream)
        return len(text)

    def flush(self) -> None:
        """As a stream does, without its errors."""
        try:
            self._stream.flush()
        except (OSError, ValueError):
            silence(self._stream)


def _text(number: int, mode: str) -> TextIO:
    return io.TextIOWrapper(io.FileIO(number, mode, closefd=False), encoding="utf-8")
