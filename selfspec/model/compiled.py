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
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

from selfspec import files
from selfspec.errors import CannotWrite
from selfspec.files import cache_folder
from selfspec.model import compiler

logger = logging.getLogger(__name__)

_WINDOW_S = 0.06  # of work, some twenty slices of a scheduler: fewer say little about neighbours

_PAUSES = 2, 32
"""Wait before all threads are tried again, in lengths of the failed try: at first, and at most. It
doubles while they find no room."""


class Team:
    """How many threads compute a round: no more than the machine has free cores for.

    Threads wait for each other several hundred times a token, and one that waits burns its core, in
    torch's operators as in ours. Tokens/s beside 0, 1, 2 busy processes (default model, no drafts,
    two cores with AVX512-BF16): always two threads 142, 43, 35; always one 90, 84, 54; a team 150,
    87, 56. No bit depends on the number of threads.
    """

    def __init__(
        self,
        wall: Callable[[], float] = time.perf_counter,
        processor: Callable[[], float] = time.process_time,
        cores: int | None = None,
    ) -> None:
        """`wall` and `processor`: clocks, in seconds. `cores` None: those of `cores()`."""
        self._wall, self._processor = wall, processor
        self._cores = cores or files.cores()
        self._free: int | None = None
        """Threads that found a core each; None: all of them."""
        self._worked_s = self._got_s = 0.0
        self._again_at, self._pause = 0.0, _PAUSES[0]

    @contextmanager
    def limited(self) -> Iterator[None]:
        """Around a round: torch's number of threads is that of the team, and then what it was."""
        most = torch.get_num_threads()
        if self._free is not None and self._wall() >= self._again_at:
            self._free = None
        wanted = min(most, self._cores, self._free or most)
        if wanted == most:
            yield
            return
        torch.set_num_threads(wanted)
        try:
            yield
        finally:
            torch.set_num_threads(most)

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Around compiled layers: a team with a core for each thread keeps all of them busy."""
        start, got = self._wall(), self._processor()
        yield
        end = self._wall()
        self._worked_s += end - start
        self._got_s += self._processor() - got
        if self._worked_s < _WINDOW_S:
            return
        threads, cores = torch.get_num_threads(), round(self._got_s / self._worked_s)
        if cores < threads and threads > 1:
            self._free = max(cores, 1)
            text = "other programs keep this machine busy: %d of %d threads compute meanwhile"
            _log_once(logging.INFO, text, self._free, threads)
            self._again_at = end + self._pause * self._worked_s
            self._pause = min(2 * self._pause, _PAUSES[1])
        elif self._free is None:
            self._pause = _PAUSES[0]
        self._worked_s = self._got_s = 0.0


TEAM = Team()
"""One for the process, as the threads are."""


def compiled(source: Path, **constants: int) -> ctypes.CDLL:
    """The library made from `source` with `constants` as macros: prebuilt if one fits, else made.

    A prebuilt one lies in the folder `prebuilt` beside the source, others in the cache folder;
    where others could put something there, one is made for this process alone. Its threads are
    torch's own. Raises ValueError, with the reason, if it cannot be had.
    """
    try:
        found = _prebuilt(source, constants)
        return _made_here(source, constants) if found is None else found[0]
    except (OSError, ValueError, subprocess.SubprocessError, CannotWrite) as error:
        reason = f"no compiled library: {error}"
        if isinstance(error, subprocess.CalledProcessError):
            lines = error.stderr.decode(errors="replace").strip().splitlines() or [str(error)]
            reason = f"the compiler failed: {lines[-1]}"
        elif isinstance(error, FileNotFoundError) and error.filename == compiler.command()[0]:
            reason = f"no compiled library: there is no C++ compiler {error.filename}"
        _log_once(
            logging.WARNING,
            "%s. The model's own modules run: slower, and where two tokens are nearly as likely "
            "a draft may decide. Install a wheel that brings compiled code, or g++ 11 or newer",
            reason,
        )
        raise ValueError(reason) from error


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
    features = processor_features()
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


def _made_here(source: Path, constants: Mapping[str, int]) -> ctypes.CDLL:
    """A library of the cache folder: whole, or not there. Nobody loads a half-written one."""
    target = compiler.this_machine(tiles=_tiles_allowed())
    name = compiler.library_name(source, constants, target)
    folder = cache_folder() / "compiled"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = folder.resolve()  # what a link leads to is looked at, and no link again
    library = folder / name
    if (place := files.open_to_others(library)) is not None:
        _log_once(
            logging.WARNING,
            "code in %s is not used but compiled anew for each process: others can change %s. Own "
            "it, and take their right to write away: chmod go-w",
            folder,
            place,
        )
        with tempfile.TemporaryDirectory() as own:
            compiler.make_library(Path(own) / name, source, constants, target)
            return _load(Path(own) / name)
    if not library.exists():
        _log_once(logging.INFO, "compiling for this processor, once, into %s", folder)
        with files.replacing(library, private=True) as new:
            compiler.make_library(new, source, constants, target)
    return _load(library)


@cache
def _log_once(level: int, text: str, *values: object) -> None:
    logger.log(level, text, *values)


def _load(library: Path) -> ctypes.CDLL:
    """Its OpenMP is the one that torch has loaded: with a second, two teams would compete."""
    openmp = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    if not openmp:
        raise ValueError("this torch has no libgomp to share threads with")
    ctypes.CDLL(openmp[0].name, ctypes.RTLD_GLOBAL | os.RTLD_NOLOAD)  # makes its names visible
    return ctypes.CDLL(str(library))


def processor_features() -> set[str]:
    """What this processor can do, as Linux calls it; matrix registers only if they are allowed."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return set()
    facts = (line.partition(":") for line in lines)
    said = (words for name, _, words in facts if name.strip() in ("flags", "Features"))
    found = set(next(said, "").split())
    return found if _tiles_allowed() else found - {"amx_tile"}


@cache
def _tiles_allowed() -> bool:
    """Ask Linux for matrix registers (AMX), for this process from now on.

    A process that uses them unasked is killed; a container may refuse (Linux, x86/xstate.html).
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18  # numbers of Linux
    return bool(ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0)
