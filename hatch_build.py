"""Compiles the libraries of a wheel, one for each kind of processor: `make wheel`.

hatchling runs this only if HATCH_BUILD_HOOKS_ENABLE is set; other builds need no compiler.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import SourceFileLoader
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

INSIDE = Path("selfspec", "model", "kernels", "prebuilt")
"""The folder of the wheel in which weights.py looks for libraries."""


class CompiledLibraries(BuildHookInterface):
    """Adds a library for each pair of macros and target to a wheel, and sets the wheel's tag."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the libraries. Raises SystemExit, with the reason, if that fails."""
        if version == "editable":
            return
        self._folder = tempfile.TemporaryDirectory()
        try:
            machine, made = build(_compiler(Path(self.root)), Path(self._folder.name))
        except subprocess.CalledProcessError as error:
            said = error.stderr.decode(errors="replace")
            raise SystemExit(f"the compiler failed: {said}") from error
        except OSError as error:
            why = f"no C++ compiler: {error}. Install g++, or name one in CXX"
            raise SystemExit(why) from error
        build_data["force_include"].update({str(file): str(INSIDE / file.name) for file in made})
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-linux_{machine}"

    def finalize(self, version: str, *_: Any) -> None:
        """Delete the compiled files, which the wheel now contains."""
        if version != "editable":
            self._folder.cleanup()


def build(compiler: ModuleType, folder: Path) -> tuple[str, list[Path]]:
    """Compile into `folder` for all processors of the compiler's machine; returns both."""
    machine = compiler.machine()
    if machine not in compiler.TARGETS:
        raise SystemExit(
            "a wheel with compiled code is for Linux on "
            f"{' or '.join(compiler.TARGETS)}; {' '.join(compiler.command())} compiles for another "
            "machine. For a wheel without compiled code, unset HATCH_BUILD_HOOKS_ENABLE"
        )

    def make(job: tuple[Path, dict[str, int], Any]) -> Path:
        library = folder / compiler.library_name(*job)
        compiler.make_library(library, *job)
        return library

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = product([compiler.SOURCE], compiler.MACROS, compiler.TARGETS[machine])
        return machine, list(pool.map(make, jobs))


def _compiler(root: Path) -> ModuleType:
    """Load selfspec/model/compiler.py alone, because its package imports torch."""
    path = root / "selfspec" / "model" / "compiler.py"
    loader = SourceFileLoader("selfspec_compiler", str(path))
    module = ModuleType(loader.name)
    module.__file__ = str(path)
    loader.exec_module(module)
    return module
