"""Chat templates: programs from outside, run with bounds.

Comes in: a tokenizer and messages. Goes out: what its template makes of them, or one line that says
why not. Called where prompts and conversations become ids.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from transformers import PreTrainedTokenizerBase

from selfspec.errors import InvalidPrompt

_MOST_LINES = 2_000_000
"""A conversation of a hundred turns takes some thousand."""

_MOST_BYTES = 1 << 30
"""Memory beside what is held already; a template that repeats a text can ask for any amount."""

_STATUS = Path("/proc/self/status")
_HELD = re.compile(r"VmData:\s+(\d+) kB")


def templated(tokenizer: PreTrainedTokenizerBase, messages: Any, **options: Any) -> Any:
    """What `apply_chat_template` gives.

    Raises InvalidPrompt for messages that the template does not take, for its own mistakes, and for
    one that runs without end or fills the memory.
    """
    try:
        with bounded():
            return tokenizer.apply_chat_template(messages, **options)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise InvalidPrompt(
            f"the chat template does not take these messages: {reason or type(error).__name__}. "
            "Give other messages, or a raw prompt"
        ) from error


@contextmanager
def bounded() -> Iterator[None]:
    """Stops a template that runs without end or fills the memory, with an error."""
    with _bounded_lines(), _bounded_memory():
        yield


@contextmanager
def _bounded_lines() -> Iterator[None]:
    """Stops a template after as many lines as none needs, with a ValueError."""
    lines = itertools.count()

    def line(*_: Any) -> Any:
        if next(lines) > _MOST_LINES:
            raise ValueError(f"it went on for more than {_MOST_LINES} lines")
        return line

    def call(frame: FrameType, *_: Any) -> Any:
        """Only the lines of templates are followed."""
        return line() if frame.f_code.co_filename == "<template>" else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        yield
    finally:
        sys.settrace(before)


@contextmanager
def _bounded_memory() -> Iterator[None]:
    """Stops a template that fills the memory, with a MemoryError; Linux only."""
    found = _HELD.search(_STATUS.read_text(encoding="ascii")) if _STATUS.is_file() else None
    if found is None:
        yield
        return
    import resource  # not on every system

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = int(found[1]) * 1024 + _MOST_BYTES
    if soft != resource.RLIM_INFINITY:
        most = min(most, soft)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
