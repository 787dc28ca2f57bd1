"""Compiled libraries for a wheel, one for each kind of processor: `make wheel`.

hatchling runs this only where HATCH_BUILD_HOOKS_ENABLE is set: any other build needs no compiler.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import SourceFileLoader
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

INSIDE = Path("selfspec", "model", "kernels", "prebuilt")
"""The folder of the wheel in which compiled.py looks for libraries."""


class CompiledLibraries(BuildHookInterface):
    """Puts one library for each source, constants and target into a wheel, and gives it a tag."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compiles. Raises SystemExit, with the reason, where that cannot be done."""
        if version == "editable":
            return
        compiler = _compiler(Path(self.root))
        targets = compiler.TARGETS.get(platform.machine(), ()) if sys.platform == "linux" else ()
        if not targets:
            raise SystemExit(
                f"no wheel with compiled code is known for {sys.platform} on {platform.machine()}: "
                f"only for Linux on {' or '.join(compiler.TARGETS)}. Build one without: unset "
                "HATCH_BUILD_HOOKS_ENABLE"
            )
        self._folder = tempfile.TemporaryDirectory()
        sources = [compiler.KERNELS / name for name in compiler.SOURCES]
        made = build(compiler, Path(self._folder.name), sources, targets)
        build_data["force_include"].update({str(file): str(INSIDE / file.name) for file in made})
        build_data["pure_python"] = False
        system = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{system}"

    def finalize(self, version: str, *_: Any) -> None:
        """Clears what was compiled: the wheel has it."""
        if version != "editable":
            self._folder.cleanup()


def build(
    compiler: ModuleType, folder: Path, sources: list[Path], targets: tuple[Any, ...]
) -> list[Path]:
    """Libraries in `folder`, of each source for each target, with all of `compiler.CONSTANTS`.

    Raises SystemExit with what the compiler said.
    """

    def make(job: tuple[Path, dict[str, int], Any]) -> Path:
        library = folder / compiler.library_name(*job)
        compiler.make_library(library, *job)
        return library

    try:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return list(pool.map(make, product(sources, compiler.CONSTANTS, targets)))
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"the compiler failed: {error.stderr.decode(errors='replace')}") from error
    except OSError as error:
        raise SystemExit(f"no C++ compiler: {error}. Install g++, or name one in CXX") from error


def _compiler(root: Path) -> ModuleType:
    """selfspec/model/compiler.py by itself: the package around it wants torch."""
    path = root / "selfspec" / "model" / "compiler.py"
    loader = SourceFileLoader("selfspec_compiler", str(path))
    module = ModuleType(loader.name)
    module.__file__ = str(path)
    loader.exec_module(module)
    return module
