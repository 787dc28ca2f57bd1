"""Errors that nobody raised on purpose: what the system refused, and bugs of selfspec.

Comes in: an exception that reached the top. Goes out: the line that says it, and for a bug a file
with versions, command and traceback. Imports no torch.
"""

from __future__ import annotations

import platform
import shlex
import time
import traceback
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

from selfspec import files
from selfspec.errors import SelfspecError, first_line

PACKAGES = ("selfspec", "torch", "transformers", "tokenizers", "safetensors", "gguf", "typer")


def interrupted(error: BaseException) -> bool:
    """Whether Ctrl-C is behind an error: an import that it stops may fail with another one."""
    return any(isinstance(entry, KeyboardInterrupt) for entry in _chain(error))


def refused(error: BaseException) -> str | None:
    """What the system would not do, in words; None for an error of another kind."""
    if isinstance(error, OSError) and error.strerror:
        if error.filename:
            return f"cannot use {error.filename}: {error.strerror}"
        return f"cannot write standard output or a file: {error.strerror}"
    text = str(error)
    if isinstance(error, MemoryError) or "out of memory" in text or "allocate memory" in text:
        return f"there is not enough memory: {first_line(error)}. Ask for less, or free some"
    return None


def bug(error: BaseException, arguments: Sequence[str]) -> str:
    """The line that says that it is one; writes its report first."""
    found = f"this is a bug of selfspec: {type(error).__name__}: {first_line(error)}"
    try:
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 10**9:09}.txt"
        path = files.cache_folder() / "bugs" / name
        files.write(path, report(error, arguments))
    except (SelfspecError, OSError) as problem:
        return f"{found}. No report could be written ({problem}). To see more, add --debug"
    return f"{found}. A report is in {path}: please send it. To see it here, add --debug"


def report(error: BaseException, arguments: Sequence[str]) -> str:
    """Versions, command and traceback, for whoever mends it."""
    versions = "".join(f"{name} {_version(name)}\n" for name in PACKAGES)
    trace = "".join(traceback.format_exception(error))
    text = (
        f"selfspec bug report\n\npython {platform.python_version()}\n{versions}"
        f"{platform.platform()}\nfolder {_here()}\n\n"
        f"selfspec {shlex.join(arguments)}\n\n{trace}"
    )
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and those that led to it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        yield error
        seen.add(id(error))
        error = error.__cause__ or error.__context__


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "is not installed"


def _here() -> str:
    try:
        return str(Path.cwd())
    except OSError:
        return "is gone"
