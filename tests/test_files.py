"""Writing: whole or not at all, over nothing of somebody else's, one writer at a time."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from selfspec import files
from selfspec.errors import CannotWrite
from tests.bad_input import snapshot


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    """A file that selfspec wrote."""
    (tmp_path / "out").write_text("# written by selfspec bench\n")
    return tmp_path / "out"


def full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, OSError])
def test_an_error_while_writing_leaves_what_was_there(
    ours: Path, error: type[BaseException]
) -> None:
    before = snapshot(ours.parent)

    def file() -> None:
        with files.replacing(ours) as new:
            new.write_text("half")
            raise error

    def folder() -> None:
        with files.replacing_folder(ours.parent / "dir") as new:
            (new / "half").write_text("half")
            raise error

    for write in (file, folder):
        with pytest.raises((error, CannotWrite)):
            write()
    assert snapshot(ours.parent) == before


def test_what_a_library_makes_beside_the_new_file_goes_with_it(ours: Path) -> None:
    """safetensors writes under a name of its own choice first, and a kill leaves that behind."""
    before = snapshot(ours.parent)
    child = os.fork()
    if child == 0:
        with files.replacing(ours) as new:
            (new.parent / ".tmpX1y2Z3").write_text("half")
            os._exit(0)  # as if killed: nothing is tidied
    os.waitpid(child, 0)
    assert snapshot(ours.parent) != before
    with files.locked(ours):
        pass
    assert snapshot(ours.parent) == before


@pytest.mark.parametrize("place", ["fsync", "replace"])
def test_a_full_disk_is_named_and_leaves_what_was_there(
    ours: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = snapshot(ours.parent)
    monkeypatch.setattr(os, "fsync", full) if place == "fsync" else monkeypatch.setattr(
        Path, "replace", full
    )
    with pytest.raises(CannotWrite, match=r"out: No space left on device\. What was there before"):
        files.write(ours, "new")
    assert snapshot(ours.parent) == before


@pytest.mark.parametrize("name", ["link", "dangling", "device", "pipe"])
def test_no_link_device_or_pipe_is_written_or_replaced(tmp_path: Path, name: str) -> None:
    (tmp_path / "target").write_text("by selfspec")
    (tmp_path / "link").symlink_to("target")
    (tmp_path / "dangling").symlink_to("nobody")
    (tmp_path / "device").symlink_to("/dev/full")
    os.mkfifo(tmp_path / "pipe")
    before = snapshot(tmp_path)
    path = tmp_path / name
    for write in (
        lambda: files.check_file(path, overwrite=True),
        lambda: files.write(path, "new"),
        lambda: files.append(path, "new"),
        lambda: files.check_folder(path, (), lambda _: True, overwrite=True),
        lambda: files.locked(path).__enter__(),
        lambda: files.replacing_folder(path).__enter__(),
    ):
        with pytest.raises(CannotWrite, match=r"is a link|is a pipe"):
            write()
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    "name", ["", "  ", "zero\0byte", "~nobody-here/out", "out/below", "/dev/full"]
)
def test_a_name_that_can_be_no_file_is_refused(
    ours: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ours.parent)
    for check in (
        lambda: files.check_file(name, overwrite=True),
        lambda: files.check_folder(name, (), lambda _: True, overwrite=True),
    ):
        with pytest.raises(CannotWrite):
            check()


def test_what_is_there_is_asked_for(ours: Path) -> None:
    with pytest.raises(CannotWrite, match=r"is there already\. Give --overwrite"):
        files.check_file(ours)
    assert files.check_file(ours, overwrite=True) == ours
    ours.write_text("a stranger's")
    with pytest.raises(CannotWrite, match="was not written by selfspec"):
        files.check_file(ours, overwrite=True)


def test_a_folder_of_somebody_else_is_left(ours: Path) -> None:
    folder = ours.parent
    assert files.check_folder(folder, ["other"], lambda _: False) == folder
    with pytest.raises(CannotWrite, match="holds out, which selfspec did not write"):
        files.check_folder(folder, ["out"], lambda _: False, overwrite=True)
    with pytest.raises(CannotWrite, match=r"holds out already\. Give --overwrite"):
        files.check_folder(folder, ["out"], lambda _: True)
    assert files.check_folder(folder, ["out"], lambda _: True, overwrite=True) == folder


HOLD = """
import sys, time
from pathlib import Path
from selfspec import files
with files.locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_an_output_has_one_writer_and_a_killed_one_is_none(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-c", HOLD, str(out)]
    root = Path(__file__).parents[1]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(CannotWrite, match="is being written by another process"):
            files.locked(out).__enter__()
        other.kill()
    with files.locked(out):
        assert [path.name for path in tmp_path.iterdir()] == [".out.lock"]
    assert list(tmp_path.iterdir()) == []


def test_what_killed_processes_left_is_cleared_and_a_folder_moved_aside_comes_back(
    tmp_path: Path,
) -> None:
    old = time.time() - 2 * 86_400
    for name in (".out.txt.a_1bcdef.new", ".mine.txt.a_1bcdef.new", ".out.txt.b_2cdefg.new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "out.txt").write_text("half")
        if "b_2c" not in name:  # that one may be in use
            os.utime(tmp_path / name, (old, old))
    files.write(tmp_path / "out.txt", "whole")
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"out.txt", ".mine.txt.a_1bcdef.new", ".out.txt.b_2cdefg.new"}
    with files.locked(tmp_path / "out.txt"):
        assert not (tmp_path / ".out.txt.b_2cdefg.new").exists()
    (tmp_path / ".folder.a_1bcdef.new" / "aside").mkdir(parents=True)
    (tmp_path / ".folder.a_1bcdef.new" / "aside" / "kept").touch()
    with files.locked(tmp_path / "folder"):
        assert [path.name for path in (tmp_path / "folder").iterdir()] == ["kept"]
