"""C++ libraries: compiled here once, or taken from the wheel if they fit; and their threads."""

from __future__ import annotations

import errno
import importlib
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from selfspec.files import cache_folder, cores, unsafe_path
from selfspec.model import compiler, weights
from selfspec.model.compiler import MACROS, SOURCE, TARGETS, Target, library_name, make_library
from selfspec.model.weights import Team, compiled_library, origin
from tests.bad_input import snapshot
from tests.models import needs_compiler

ROOT = Path(__file__).parents[2]
NUMBER = "-DNUMBER=42"

OURS = TARGETS.get(platform.machine(), ())
HAS = weights.processor_features()
FITTING = [target for target in OURS if target.needs <= HAS]
needs_a_fitting_target = pytest.mark.skipif(
    shutil.which("c++") is None or not FITTING,
    reason="needs a compiler, and Linux to name features",
)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A C++ file whose `answer` is the macro NUMBER; nothing is compiled or logged yet."""
    weights._log_once.cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "kernels" / "answer.cpp"
    path.parent.mkdir()
    path.write_text('extern "C" int answer() { return NUMBER; }', encoding="utf-8")
    return path


def prebuild(source: Path, target: Target) -> Path:
    library = source.parent / "prebuilt" / library_name(source, NUMBER, target)
    library.parent.mkdir(exist_ok=True)
    make_library(library, source, NUMBER, target)
    return library


# --- compiled here


def test_the_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (compiler.version() is None) == (shutil.which("c++") is None)
    monkeypatch.setenv("CXX", "echo a compiler")
    assert compiler.version() == "a compiler --version"
    assert origin() == "here, by a compiler --version"
    for command in ("no-such-compiler", "c++ '"):
        monkeypatch.setenv("CXX", command)
        assert origin() is None
    monkeypatch.setenv("CXX", " ")
    assert compiler.command() == ["c++"]


def test_a_missing_compiler_is_logged_once(
    source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -pipe")
    monkeypatch.setattr(weights, "_prebuilt_library", lambda *_: None)
    for _ in range(2):
        with pytest.raises(ValueError, match="compiler no-such-compiler"):
            compiled_library(source, NUMBER)
    (message,) = caplog.messages
    assert "compiler no-such-compiler. The model's own modules run: slower" in message
    assert message.endswith("Install a wheel that brings compiled code, or g++ 11 or newer")


@needs_compiler
@pytest.mark.parametrize("mask", [0o022, 0o002])  # the second leaves folders open to the group
def test_a_file_is_compiled_once(mask: int, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    umask = os.umask(mask)
    try:
        assert compiled_library(source, NUMBER).answer() == 42
    finally:
        os.umask(umask)
    files = list(cache_folder().rglob("*"))
    monkeypatch.setattr(compiler, "make_library", None)
    assert compiled_library(source, NUMBER).answer() == 42
    with pytest.raises(TypeError):
        compiled_library(source, "-DNUMBER=43")
    assert list(cache_folder().rglob("*")) == files


@needs_compiler
@pytest.mark.parametrize("left", [0.0, 0.5, 0.99])  # share; loading some kills the process
def test_a_truncated_library_is_compiled_again(left: float, source: Path) -> None:
    target = compiler.this_machine(tiles=weights._tiles_allowed())
    library = cache_folder() / "compiled" / library_name(source, NUMBER, target)
    library.parent.mkdir(mode=0o700, parents=True)
    make_library(library, source, NUMBER, target)
    size = library.stat().st_size
    os.truncate(library, int(size * left))
    library.chmod(0o600)
    assert compiled_library(source, NUMBER).answer() == 42
    assert library.stat().st_size == size


def as_somebody(path: Path) -> None:
    os.chown(path, 65534, 65534)


UNSAFE: dict[str, Callable[[Path], object]] = {
    "file to all": lambda library: library.chmod(0o666),
    "file to the group": lambda library: library.chmod(0o620),
    "file of somebody": as_somebody,
    "file behind a link": lambda library: library.symlink_to(library.rename(f"{library}.kept")),
    "folder to all": lambda library: library.parent.chmod(0o777),
    "folder with a sticky bit": lambda library: library.parent.chmod(0o1777),
    "folder to the group": lambda library: library.parent.chmod(0o770),
    "folder of somebody": lambda library: as_somebody(library.parent),
    "cache to all": lambda library: library.parents[2].chmod(0o777),
    "cache of somebody": lambda library: as_somebody(library.parents[2]),
}


@pytest.mark.parametrize("kind", UNSAFE)
def test_places_that_others_can_change_are_found(kind: str, source: Path) -> None:
    if "somebody" in kind and os.geteuid():
        pytest.skip("needs a second user")
    library = cache_folder() / "compiled" / "library.so"
    library.parent.mkdir(parents=True)
    library.touch(0o600)
    assert unsafe_path(library) is None
    UNSAFE[kind](library)
    assert unsafe_path(library) is not None


@needs_compiler
def test_code_open_to_others_is_not_loaded(source: Path, caplog: pytest.LogCaptureFixture) -> None:
    target = compiler.this_machine(tiles=weights._tiles_allowed())
    library = cache_folder() / "compiled" / library_name(source, NUMBER, target)
    library.parent.mkdir(parents=True)
    make_library(library, source, "-DNUMBER=13", target)
    library.chmod(0o600)
    assert compiled_library(source, NUMBER).answer() == 13  # no other user can have put it there
    library.parent.chmod(0o777)
    content = snapshot(cache_folder())
    for _ in range(2):
        assert compiled_library(source, NUMBER).answer() == 42
    assert len([text for text in caplog.messages if "others can change" in text]) == 1
    assert snapshot(cache_folder()) == content


@needs_compiler
def test_an_unwritable_cache_folder_only_costs_time(
    source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(source))  # a file
    assert compiled_library(source, NUMBER).answer() == 42
    assert caplog.messages[0].endswith("takes no files. Set XDG_CACHE_HOME to a folder that does")


@needs_compiler
def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(source: Path) -> None:
    source.write_text('#error not today\n#include "nothing.hpp"', encoding="utf-8")
    with pytest.raises(ValueError, match=r"the compiler failed: .+ error: #error not today"):
        compiled_library(source, NUMBER)
    assert not list((cache_folder() / "compiled").iterdir())


@needs_compiler
def test_a_full_disk_is_named_not_the_linker(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(shutil, "copyfile", Mock(side_effect=full))
    with pytest.raises(ValueError, match=f"{cache_folder()}/compiled/.*: No space left"):
        compiled_library(source, NUMBER)


def runtimes() -> set[str]:
    """OpenMP runtimes that this process has loaded."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return {line.split()[-1] for line in lines if "gomp" in line}


@needs_compiler
def test_threads_are_those_of_the_runtime_that_torch_loaded(source: Path) -> None:
    """A second runtime is neither called nor loaded."""
    text = """
        extern "C" int threads() {
          int all = 0;
        #pragma omp parallel reduction(+ : all)
          all++;
          return all;
        }"""
    source.write_text(text, encoding="utf-8")
    loaded = runtimes()
    torch.set_num_threads(3)
    assert compiled_library(source, NUMBER).threads() == 3
    assert runtimes() == loaded


# --- taken from the wheel


@needs_a_fitting_target
def test_a_prebuilt_library_precedes_the_compiler_and_the_fastest_comes_first(source: Path) -> None:
    for target in FITTING[::-1]:
        library = prebuild(source, target)
        assert compiled_library(source, NUMBER)._name == str(library)
    assert not cache_folder().exists()


@needs_a_fitting_target
@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("source", "was made from another source"),
        ("processor", "this processor lacks avx4096"),
        ("file", r"file too short|invalid ELF header"),
    ],
)
def test_a_prebuilt_library_that_does_not_fit_is_skipped(
    wrong: str,
    why: str,
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    target = FITTING[0]
    if wrong == "processor":
        target = target._replace(needs=target.needs | {"avx4096"})
        monkeypatch.setattr(compiler, "TARGETS", {platform.machine(): (target,)})
    library = prebuild(source, target)
    if wrong == "source":
        (source.parent / "header.hpp").write_text("// new", encoding="utf-8")
    elif wrong == "file":
        library.write_bytes(b"\x7fELF of a newer system")
    with caplog.at_level(logging.DEBUG, logger=weights.__name__):
        code = compiled_library(source, NUMBER)
    assert code.answer() == 42
    assert Path(code._name).is_relative_to(cache_folder())
    assert re.search(why, caplog.text)


@pytest.mark.parametrize(
    ("text", "features"),
    [
        *[(text, set()) for text in ("", "model name : of no features\n", None)],
        *[
            (f"processor\t: 0\n{key}: fpu avx2\n\nprocessor\t: 1\n{key}: fpu\n", {"fpu", "avx2"})
            for key in ("flags\t\t", "Features\t")
        ],
    ],
)
def test_features_are_those_of_the_first_core_if_the_system_lists_any(
    text: str | None, features: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Mock(side_effect=FileNotFoundError if text is None else None, return_value=text)
    monkeypatch.setattr(Path, "read_text", read)
    assert weights.processor_features() == features


@needs_compiler
@pytest.mark.parametrize("allowed", [True, False] if platform.machine() == "x86_64" else [])
def test_refused_matrix_registers_stay_off(allowed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "flags : fpu amx_tile amx_bf16\n")
    monkeypatch.setattr(weights, "_tiles_allowed", lambda: allowed)
    assert ("amx_tile" in weights.processor_features()) is allowed
    monkeypatch.setenv("CXX", " ".join([*compiler.command(), "-mamx-tile", "-mamx-bf16"]))
    flags = compiler.this_machine(tiles=allowed).flags.split()
    macros = compiler._run(*flags, "-x", "c++", "-E", "-dM", os.devnull)
    assert (b"__AMX_BF16__" in macros) is allowed


# --- the build of a wheel


@pytest.fixture
def hook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The hook of hatch_build.py in a tree whose kernels are small; hatchling is not needed."""
    interface = types.ModuleType("hatchling.builders.hooks.plugin.interface")
    interface.BuildHookInterface = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.delitem(sys.modules, "hatch_build", raising=False)
    build_hook = importlib.import_module("hatch_build").CompiledLibraries()
    build_hook.root = str(tmp_path)
    folder = tmp_path / "selfspec" / "model"
    (folder / "kernels").mkdir(parents=True)
    shutil.copy(compiler.__file__, folder)
    text = 'extern "C" int answer() { return 40 + BFLOAT16; }'
    (folder / "kernels" / SOURCE.name).write_text(text, encoding="utf-8")
    return build_hook


@needs_a_fitting_target
def test_a_wheel_has_a_library_for_every_kind_of_processor(
    hook: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data: dict[str, Any] = {"force_include": {}}
    hook.initialize("standard", data)
    files = data["force_include"]
    assert len(files) == len(MACROS) * len(OURS)
    assert data["tag"] == f"py3-none-linux_{platform.machine()}"
    assert not data["pure_python"]
    for library, inside in files.items():
        (tmp_path / inside).parent.mkdir(exist_ok=True)
        shutil.copy(library, tmp_path / inside)
    hook.finalize("standard", data, "")
    assert not any(Path(library).exists() for library in files)
    monkeypatch.setenv("CXX", "false")
    installed = tmp_path / "selfspec" / "model" / "kernels"
    assert compiled_library(installed / SOURCE.name, MACROS[1]).answer() == 41
    monkeypatch.setattr(compiler, "SOURCE", installed / SOURCE.name)
    assert origin() == f"in the wheel, for {FITTING[0].name}"


def test_an_editable_install_compiles_nothing(hook: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    data: dict[str, Any] = {}
    hook.initialize("editable", data)
    hook.finalize("editable", data, "")
    assert not data


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("no-such-compiler", r"no C\+\+ compiler: .*no-such-compiler"),
        ("echo pdp11-dec-linux-gnu", "x86_64 or aarch64; echo pdp11-dec-linux-gnu compiles for"),
        ("echo x86_64-apple-darwin", "for Linux on x86_64 or aarch64; echo x86_64-apple"),
    ],
)
def test_a_wheel_that_cannot_be_built_says_why(
    command: str, why: str, hook: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", command)
    with pytest.raises(SystemExit, match=why):
        hook.initialize("standard", {})


# --- one thread per free core, by clocks that the tests set


class Machine:
    """Cores of which other programs use a share; its clocks advance with the passes."""

    def __init__(self) -> None:
        self.cores = 2
        self.pass_s = 0.01
        self.wall_s = self.processor_s = 0.0
        self.others = 0.0
        """Cores that other programs keep busy."""
        self.team = Team(lambda: self.wall_s, lambda: self.processor_s, 16)
        self.used: list[int] = []
        """Threads of each pass."""

    def run(self, seconds: float) -> list[int]:
        """Run rounds of one pass each; return torch's number of threads in each."""
        start = len(self.used)
        end = self.wall_s + seconds
        while self.wall_s < end:
            with self.team.limited(), self.team.measured():
                threads = torch.get_num_threads()
                self.used.append(threads)
                self.wall_s += self.pass_s
                self.processor_s += self.pass_s * min(threads, self.cores - self.others)
        return self.used[start:]


@pytest.fixture
def machine() -> Machine:
    torch.set_num_threads(2)
    return Machine()


@pytest.mark.parametrize(
    ("cores", "others", "pass_s", "left"),
    [
        (2, 0.1, 0.01, 2),  # the load of the system itself
        *((2, others, 0.01, 1) for others in (0.8, 1.0, 1.5)),
        (2, 1.0, 2.0, 1),
        (16, 3.0, 0.01, 13),
    ],
)
def test_on_a_busy_machine_fewer_threads_run_and_seldom_try_more(
    machine: Machine, cores: int, others: float, pass_s: float, left: int
) -> None:
    torch.set_num_threads(cores)
    machine.cores, machine.others, machine.pass_s = cores, others, pass_s
    used = machine.run(2000 * pass_s)
    assert used[0] == cores
    assert used[10] == left
    share = used[len(used) // 2 :].count(cores) / (len(used) / 2)  # looking for a free core
    assert share == 1 if left == cores else 0 < share < 0.06


def test_a_limit_of_cores_is_kept_and_a_busy_machine_is_logged(
    machine: Machine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    free = cores(limit := tmp_path / "cpu.max")
    for text, most in (("150000 100000", 2), ("20000 100000", 1), ("max 100000", 999)):
        limit.write_text(text)
        assert cores(limit) == min(most, free)
    machine.team = Team(lambda: machine.wall_s, lambda: machine.processor_s, cores=1)
    for machine.others in (0.0, 1.5, 0.0):
        assert set(machine.run(5.0)) == {1}
        assert machine.team.crowded == (machine.others > 0.0)
    machine.team, machine.others = Team(lambda: machine.wall_s, lambda: machine.processor_s, 2), 1.0
    weights._log_once.cache_clear()
    with caplog.at_level("INFO", "selfspec"):
        machine.run(5.0)
    assert len(caplog.messages) == 1
    assert "busy: computing with 1 of 2 threads for now" in caplog.messages[0]


def test_all_threads_return_when_other_programs_have_ended(machine: Machine) -> None:
    machine.others = 1.0
    machine.run(20.0)
    machine.others = 0.0
    assert set(machine.run(10.0)[-500:]) == {2}
    machine.others = 1.0
    machine.run(0.1)
    assert 2 in machine.run(0.2)  # retries soon: a quiet phase resets the waiting time


def test_loading_leaves_out_threads_without_a_free_core(machine: Machine) -> None:
    def tick() -> float:
        machine.wall_s += 0.01
        machine.processor_s += 0.01 * min(torch.get_num_threads(), 2 - machine.others)
        return machine.wall_s

    machine.team = Team(tick, lambda: machine.processor_s, 2)
    torch.set_num_threads(4)  # more than the cores, as in a container with a limit
    for machine.others in (0.0, 1.0):
        with machine.team.probed():
            assert torch.get_num_threads() == 2 - machine.others
        assert machine.team.crowded == (machine.others > 0.0)
    assert torch.get_num_threads() == 4


def test_the_users_number_of_threads_is_restored_after_a_round(machine: Machine) -> None:
    machine.others = 1.0
    machine.run(0.1)
    with suppress(KeyboardInterrupt), machine.team.limited():
        assert torch.get_num_threads() == 1
        raise KeyboardInterrupt
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
    assert set(machine.run(1.0)) == {1}


FORK = """
import os, sys, torch
from selfspec.api.speculator import wrap
from tests.models import make_model, random_ids

torch.set_num_threads(2)
speculator, ids = wrap(make_model("llama")), random_ids(60)
expected = speculator.generate(ids, max_new_tokens=8).token_ids
if not (child := os.fork()):
    both = speculator, wrap(speculator.model)
    os._exit(any(each.generate(ids, max_new_tokens=8).token_ids != expected for each in both))
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_computes_with_one_thread() -> None:
    """With more it would wait forever: OpenMP's threads are gone."""
    subprocess.run([sys.executable, "-c", FORK], check=True, timeout=300)
