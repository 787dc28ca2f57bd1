"""Compiles a C++ file to a library, for this machine or for the processors of a wheel.

hatch_build.py loads this file by its path, without the package and without torch, so it may import
only the standard library.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

KERNELS = Path(__file__).parent / "kernels"
SOURCE = KERNELS / "kernels.cpp"

PANEL = 16  # outputs side by side, as in `panels.hpp`
MACROS = "-DBFLOAT16=0", "-DBFLOAT16=1"
"""The dtypes that a wheel has libraries for: float32 and bfloat16."""

_FLAGS = (
    *("-std=c++20", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC"),
    "-fno-thread-jumps",  # else a bounded exponential is divided twice, once to a slow denormal
)
"""With these, results do not differ between two runs of one library."""


class Target(NamedTuple):
    """The processors that a library is built for."""

    name: str
    flags: str  # of the compiler
    needs: frozenset[str] = frozenset()  # required CPU features, as named in /proc/cpuinfo


_V2 = frozenset(["cx16", "lahf_lm", "pni", "popcnt", "sse4_1", "sse4_2", "ssse3"])
_V3 = _V2 | frozenset(["abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"])
_V4 = _V3 | frozenset(["avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"])
_AMX = _V4 | {"avx512_bf16", "amx_bf16", "amx_tile"}

TARGETS: Mapping[str, tuple[Target, ...]] = {
    "x86_64": (
        Target("x86-64-v4-amx", "-march=x86-64-v4 -mavx512bf16 -mamx-tile -mamx-bf16", _AMX),
        Target("x86-64-v4-bf16", "-march=x86-64-v4 -mavx512bf16", _V4 | {"avx512_bf16"}),
        Target("x86-64-v4", "-march=x86-64-v4", _V4),
        Target("x86-64-v3", "-march=x86-64-v3", _V3),
        Target("x86-64-v2", "-march=x86-64-v2", _V2),
    ),
    "aarch64": (Target("armv8-a", "-march=armv8-a", frozenset({"asimd"})),),
}
"""The targets of a wheel, by `platform.machine()`, fastest first."""


def machine() -> str:
    """The compiler's target, named as by `platform.machine()`; "" if it is not Linux."""
    name, *system = _run("-dumpmachine").decode(errors="replace").strip().split("-")
    return name if "linux" in system else ""


def this_machine(*, tiles: bool) -> Target:
    """The target of this processor; `tiles`: whether its AMX registers may be used.

    Raises OSError or SubprocessError without a compiler.
    """
    flags = "-march=native"
    macros = _run(*_FLAGS, flags, "-x", "c++", "-E", "-dM", os.devnull)
    if not tiles and b"__AMX_TILE__" in macros:
        flags += " -mno-amx-tile -mno-amx-bf16"  # the compiler asks for both
    return Target(f"native-{hashlib.sha256(macros).hexdigest()[:8]}", flags)


def library_name(source: Path, macro: str, target: Target) -> str:
    """SOURCE-TARGET-DIGEST.so; the digest is of the source, the headers beside it and the flags."""
    texts = [path.read_bytes() for path in (source, *sorted(source.parent.glob("*.hpp")))]
    flags = " ".join((*_FLAGS, target.flags, macro)).encode()
    digest = hashlib.sha256(b"".join((*texts, flags))).hexdigest()[:16]
    return f"{source.stem}-{target.name}-{digest}.so"


def make_library(library: Path, source: Path, macro: str, target: Target) -> None:
    """Compile `source` with a macro like those of `MACROS`. Raises OSError or SubprocessError.

    No OpenMP runtime is linked: its symbols are resolved from the runtime that is loaded.
    """
    with tempfile.TemporaryDirectory() as folder:
        object_file, linked = Path(folder) / "made.o", Path(folder) / "made.so"
        _run(*_FLAGS, *target.flags.split(), macro, "-c", str(source), "-o", str(object_file))
        _run("-shared", str(object_file), "-o", str(linked))
        shutil.copyfile(linked, library)  # on a full disk this error is clearer than the linker's


def version() -> str | None:
    """The first line of the compiler's --version, or None if there is no compiler."""
    try:
        return _run("--version").decode(errors="replace").partition("\n")[0]
    except (OSError, ValueError, subprocess.SubprocessError):  # ValueError: a quote is not closed
        return None


def command() -> list[str]:
    return shlex.split(os.environ.get("CXX", "")) or ["c++"]


def _run(*arguments: str) -> bytes:
    line = [*command(), *arguments]
    return subprocess.run(line, check=True, capture_output=True, timeout=600).stdout
