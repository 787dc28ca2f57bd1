"""Compiles a C++ file on the machine that runs it, once, and loads it.

For the few loops that torch has no operator for. Whoever has no compiler does without them.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shlex
import subprocess
from pathlib import Path

import torch

from selfspec import files
from selfspec.errors import CannotWrite
from selfspec.files import cache_folder

logger = logging.getLogger(__name__)

_FLAGS = "-std=c++17 -O3 -march=native -fno-math-errno -fno-trapping-math -fopenmp -fPIC -shared"
"""None of them lets results differ between two runs of one library."""

_PATIENCE = 120
"""Seconds after which a compiler is given up."""


def compiled(source: Path, **constants: int) -> ctypes.CDLL:
    """The library made from `source` with `constants` as macros; kept in the cache folder.

    It may include headers that lie beside it. Its threads are torch's own. Raises ValueError, with
    the reason, if it cannot be had.
    """
    macros = [f"-D{name}={value}" for name, value in sorted(constants.items())]
    arguments = [*_FLAGS.split(), *macros, str(source), str(_openmp())]
    try:
        headers = sorted(source.parent.glob("*.hpp"))
        texts = b"".join(path.read_bytes() for path in (source, *headers))
        made_from = texts + _target() + " ".join([*macros, arguments[-1]]).encode()
        digest = hashlib.sha256(made_from).hexdigest()[:16]
        library = cache_folder() / "compiled" / f"{source.stem}-{digest}.so"
        if not library.exists():
            _make(library, arguments)
        return ctypes.CDLL(str(library))
    except (OSError, subprocess.SubprocessError, CannotWrite) as error:
        raise ValueError(_reason(error)) from error


def compiler() -> str | None:
    """What the compiler calls itself, or None if there is none."""
    try:
        return _compiler("--version").decode(errors="replace").partition("\n")[0]
    except (OSError, subprocess.SubprocessError):
        return None


def _make(library: Path, arguments: list[str]) -> None:
    """Whole, or not there: nobody loads a half-written library."""
    library.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with files.replacing(library) as new:
        _compiler(*arguments, "-o", str(new))
    logger.info("compiled %s", library)


def _target() -> bytes:
    """What the compiler says of itself and this processor: a cache folder may serve several."""
    return _compiler(*_FLAGS.split(), "-x", "c++", "-E", "-dM", os.devnull)


def _compiler(*arguments: str) -> bytes:
    """Runs $CXX, or c++; returns what it prints."""
    command = [*shlex.split(os.environ.get("CXX") or "c++"), *arguments]
    done = subprocess.run(command, check=True, capture_output=True, timeout=_PATIENCE)
    return done.stdout


def _openmp() -> Path:
    """The runtime that torch brings along: with another one, two sets of threads would compete."""
    found = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    if not found:
        raise ValueError("this torch has no libgomp to share threads with")
    return found[0]


def _reason(error: OSError | subprocess.SubprocessError | CannotWrite) -> str:
    """The last line that a compiler that failed had to say, or the error's own words."""
    if isinstance(error, subprocess.CalledProcessError):
        lines = error.stderr.decode(errors="replace").strip().splitlines() or [str(error)]
        return f"the compiler failed: {lines[-1]}"
    return f"no compiled library: {error}"
