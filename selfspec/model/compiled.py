"""Libraries of compiled C++: one that the wheel brings, or made here once by the user's compiler.

For the few loops that torch has no operator for. Who has neither does without them.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch

from selfspec import files
from selfspec.errors import CannotWrite
from selfspec.files import cache_folder
from selfspec.model import compiler

logger = logging.getLogger(__name__)

_TILES = "amx_tile"

_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18
"""Numbers of Linux: arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA."""


def compiled(source: Path, **constants: int) -> ctypes.CDLL:
    """The library made from `source` with `constants` as macros: prebuilt if one fits, else made.

    A prebuilt one lies in the folder `prebuilt` beside the source, others in the cache folder.
    Either includes headers that lie beside the source. Its threads are torch's own. Raises
    ValueError, with the reason, if it cannot be had.
    """
    try:
        found = _prebuilt(source, constants)
        return _load(_made_here(source, constants)) if found is None else found[0]
    except (OSError, subprocess.SubprocessError, CannotWrite) as error:
        raise ValueError(_reason(error)) from error


def origin() -> str | None:
    """Where compiled code comes from: the wheel, a compiler, or None if from neither."""
    with contextlib.suppress(ValueError):
        found = _prebuilt(compiler.KERNELS / compiler.SOURCES[0], compiler.CONSTANTS[0])
        if found is not None:
            return f"in the wheel, for {found[1].name}"
    name = compiler.version()
    return name and f"here, by {name}"


def _prebuilt(
    source: Path, constants: Mapping[str, int]
) -> tuple[ctypes.CDLL, compiler.Target] | None:
    """The fastest that was made from this very source and that this processor runs."""
    folder = source.parent / "prebuilt"
    if not folder.is_dir():
        return None
    features = _features()
    for target in compiler.TARGETS.get(platform.machine(), ()):
        library = folder / compiler.library_name(source, constants, target)
        if lacking := target.needs - features:
            why = f"this processor lacks {', '.join(sorted(lacking))}"
        elif not library.exists():
            why = f"not in {folder}: what is there was made from another source"
        else:
            try:
                return _load(library), target
            except OSError as error:
                why = str(error)
        logger.debug("%s is passed over: %s", library.name, why)
    return None


def _made_here(source: Path, constants: Mapping[str, int]) -> Path:
    """A library in the cache folder: whole, or not there. Nobody loads a half-written one."""
    target = compiler.this_machine(tiles=_tiles_allowed())
    library = cache_folder() / "compiled" / compiler.library_name(source, constants, target)
    if not library.exists():
        library.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _announce(library.parent)
        with files.replacing(library) as new:
            compiler.make_library(new, source, constants, target)
    return library


@cache
def _announce(folder: Path) -> None:
    """Once, however many libraries are made."""
    logger.info("compiling for this processor, once, into %s", folder)


def _load(library: Path) -> ctypes.CDLL:
    """A library has no OpenMP of its own: its calls find the one that torch has loaded.

    With a second one, two sets of threads would compete.
    """
    openmp = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    if not openmp:
        raise ValueError("this torch has no libgomp to share threads with")
    ctypes.CDLL(openmp[0].name, ctypes.RTLD_GLOBAL | os.RTLD_NOLOAD)  # makes its names visible
    return ctypes.CDLL(str(library))


def _features() -> set[str]:
    """What this processor can do, in the words of Linux; nothing where Linux does not say.

    Matrix registers that the system does not allow are left out.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return set()
    facts = (line.partition(":") for line in lines)
    said = (words for name, _, words in facts if name.strip() in ("flags", "Features"))
    found = set(next(said, "").split())
    if _TILES in found and not _tiles_allowed():
        found.remove(_TILES)
    return found


@cache
def _tiles_allowed() -> bool:
    """Ask Linux for matrix registers (AMX), for this process from now on.

    A process that uses them unasked is killed; a container may refuse (Linux, x86/xstate.html).
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    system_call = ctypes.CDLL(None).syscall
    return bool(system_call(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0)


def _reason(error: OSError | subprocess.SubprocessError | CannotWrite) -> str:
    """The last line that a compiler that failed had to say, or the error's own words."""
    if isinstance(error, subprocess.CalledProcessError):
        lines = error.stderr.decode(errors="replace").strip().splitlines() or [str(error)]
        return f"the compiler failed: {lines[-1]}"
    if isinstance(error, FileNotFoundError) and error.filename == compiler.program():
        say_missing(error.filename)
        return f"no compiled library: there is no C++ compiler {error.filename}"
    return f"no compiled library: {error}"


@cache
def say_missing(program: str) -> None:
    """Log, once, what a compiler would be good for."""
    logger.info("slower without a C++ compiler (%s): install g++ 11 or newer", program)
