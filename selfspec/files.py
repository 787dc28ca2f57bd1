"""The one way in which selfspec writes files: whole or not at all, and never over a stranger's.

Comes in: a name, and content or a block that fills a temporary name. Goes out: the file or folder,
renamed into place once it is on the disk. What this tool did not write is never replaced, nor is a
device, a link or, unless `overwrite` says so, a finished result. Called by everything that writes.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from selfspec.errors import CannotWrite, InvalidOption, first_line

MARK = b"selfspec"
"""What every file that selfspec writes says near its beginning, so that it is known again."""

_MARK_WITHIN = 4096
"""Bytes from the beginning in which the mark is looked for."""

_STALE_S = 60.0
"""Age from which a temporary name of a process that is gone is cleared away."""

_KINDS = (
    (stat.S_ISLNK, "a link"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
)


def cache_folder() -> Path:
    """The folder for files that can be made again: $XDG_CACHE_HOME or ~/.cache, then selfspec."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return local_path(base) / "selfspec"


def local_path(name: str | Path) -> Path:
    """A name as a path, `~` replaced. Raises InvalidOption where there is no such home folder."""
    try:
        path = Path(name).expanduser()
        path.exists()
    except (RuntimeError, ValueError) as error:
        raise InvalidOption(f"{str(name)!r} names no file: {first_line(error)}") from error
    except OSError as error:
        raise InvalidOption(f"cannot use {str(name)!r}: {error.strerror}") from error
    return path


# --- before long work begins ----------------------------------------------------------------------


def check_file(path: str | Path, *, overwrite: bool = False) -> Path:
    """`path`, if a file may be written there; asked before the work that ends in it.

    Raises CannotWrite for an empty name, a folder, a device, a link, a folder around it that cannot
    be written to, a file that selfspec did not write, and without `overwrite` for one that it did.
    """
    path = _named(path)
    _refuse_special(path)
    if path.is_dir():
        raise CannotWrite(f"{path} is a folder. Name a file")
    if path.exists():
        if not written_here(path):
            raise CannotWrite(f"{path} was not written by selfspec. Give another name")
        if not overwrite:
            raise CannotWrite(f"{path} is there already. Give --overwrite or another name")
    _require_writable(path.parent)
    return path


def check_folder(
    folder: str | Path,
    names: Collection[str],
    is_ours: Callable[[Path], bool],
    *,
    overwrite: bool = False,
) -> Path:
    """`folder`, if files called `names` may be written into it; asked before the work.

    `is_ours` says of a folder with some of these names whether selfspec made it. Raises CannotWrite
    as `check_file` does: a folder of somebody else's, or without `overwrite` one of ours.
    """
    folder = _named(folder)
    _refuse_special(folder)
    if folder.exists() and not folder.is_dir():
        raise CannotWrite(f"{folder} is a file. Name a folder")
    _require_writable(folder)
    for name in names:
        _refuse_special(folder / name)
    if there := [name for name in sorted(names) if (folder / name).exists()]:
        if not is_ours(folder):
            raise CannotWrite(
                f"{folder} holds {there[0]}, which selfspec did not write. Name another folder"
            )
        if not overwrite:
            raise CannotWrite(f"{folder} holds {there[0]} already. Give --overwrite or another one")
    return folder


def written_here(path: Path) -> bool:
    """Whether a file carries the mark of this tool, or is empty."""
    try:
        with path.open("rb") as file:
            begin = file.read(_MARK_WITHIN)
    except OSError:
        return False
    return not begin or MARK in begin


# --- writing --------------------------------------------------------------------------------------


def write(path: Path, content: str | bytes) -> None:
    """Replace the file at `path`, making the folders around it. Raises CannotWrite."""
    data = content.encode("utf-8") if isinstance(content, str) else content
    with replacing(path) as new:
        new.write_bytes(data)


def append(path: Path, line: str) -> None:
    """Add a line to a file, whole or not at all; the line feed is added. Raises CannotWrite."""
    with _explained(path):
        _refuse_special(path)
        size = path.stat().st_size if path.exists() else 0
        try:
            with path.open("ab", buffering=0) as file:
                data = f"{line}\n".encode()
                while data:
                    data = data[file.write(data) :]
        except BaseException:
            with contextlib.suppress(OSError):
                os.truncate(path, size)
            raise


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary place with the same file name, whose file then takes the place of `path`.

    It lies in a folder of its own beside `path`, so that whatever a library puts next to it while
    it writes (safetensors does) is cleared with it. After an error, an interrupt too, `path` is as
    it was and that folder is gone. Raises CannotWrite where the disk does not take it, or `path` is
    a device, a link or a folder.
    """
    room = _temporary(path, "new")
    new = room / path.name
    try:
        with _explained(path):
            _refuse_special(path)
            path.parent.mkdir(parents=True, exist_ok=True)
            _sweep(path)
            room.mkdir(exist_ok=True)
            yield new
            new.chmod(0o644)  # safetensors makes files that only their owner can read
            _to_disk(new)
            new.replace(path)
            _to_disk(path.parent)
    finally:
        shutil.rmtree(room, ignore_errors=True)


@contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """A new empty folder beside `folder`, which then takes its place as a whole.

    After an error `folder` is as it was. Raises CannotWrite.
    """
    new, old = _temporary(folder, "new"), _temporary(folder, "old")
    try:
        with _explained(folder):
            _refuse_special(folder)
            _sweep(folder)
            new.mkdir(parents=True)
            yield new
            for file in new.rglob("*"):
                file.chmod(0o755 if file.is_dir() else 0o644)
                _to_disk(file)
            if folder.exists():
                folder.rename(old)
            new.rename(folder)
            _to_disk(folder.parent)
    finally:
        if old.exists() and not folder.exists():
            old.rename(folder)
        for left in (new, old):
            shutil.rmtree(left, ignore_errors=True)


@contextmanager
def locked(output: Path, *, wait: bool = False) -> Iterator[None]:
    """While open, no other process may write `output`, a file or a folder.

    A lock ends with its process, however that ends. Raises CannotWrite while another one holds it,
    unless told to `wait` for that.
    """
    place = output.with_name(f".{output.name[:100]}.lock")
    if output.is_dir() and not os.access(place.parent, os.W_OK):
        place = output / ".lock"
    lock = FileLock(place, timeout=-1 if wait else 0)
    with _explained(output):
        _refuse_special(output)
        place.parent.mkdir(parents=True, exist_ok=True)
        _refuse_special(place)
        try:
            lock.acquire()
            while not place.exists():  # the one before took it away between our open and our lock
                lock.release()
                lock.acquire()
        except Timeout as error:
            raise CannotWrite(
                f"{output} is being written by another process. Wait for it, or name another output"
            ) from error
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # Windows removes no open files
            place.unlink(missing_ok=True)
        lock.release()


def sweep(output: Path) -> None:
    """Remove what killed processes left of `output` under temporary names, whatever their age.

    Only for who has the lock of `output`: nobody else writes there.
    """
    found = [*output.parent.glob(f".{glob.escape(output.name[:100])}.*.new")]
    if output.is_dir():
        found += [*output.glob(".*.new"), *output.glob("*/.*.new")]
    for left in found:
        name = re.fullmatch(r"\..*\.([0-9]+)\.new", left.name)
        # whoever else has its number now: a writer would need the lock
        if name and not left.is_symlink() and int(name[1]) != os.getpid():
            shutil.rmtree(left, ignore_errors=True)


# --- what they share ------------------------------------------------------------------------------


def _named(path: str | Path) -> Path:
    """Raises CannotWrite for text that names no file."""
    if isinstance(path, str) and not path.strip():
        raise CannotWrite("the output's name is empty. Name a file or a folder")
    if "\0" in str(path):
        raise CannotWrite(f"the output's name {str(path)!r} holds a zero byte. Name another one")
    try:
        return Path(path).expanduser()
    except RuntimeError as error:  # ~ of somebody who is not here
        raise CannotWrite(f"there is no home folder for {path}. Name another place") from error


def _refuse_special(path: Path) -> None:
    """Raise CannotWrite for what is neither a plain file, a folder, nor free."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise CannotWrite(f"cannot write {path}: {error.strerror}. Name another one") from error
    for matches, words in _KINDS:
        if matches(mode):
            raise CannotWrite(f"{path} is {words}, which selfspec does not replace. Name a file")


def _require_writable(folder: Path) -> None:
    """Raise CannotWrite unless `folder`, or the nearest one around it that exists, takes files."""
    try:
        near = next(entry for entry in (folder, *folder.absolute().parents) if entry.exists())
    except OSError as error:
        raise CannotWrite(f"cannot write into {folder}: {error.strerror}") from error
    if not near.is_dir():
        raise CannotWrite(f"cannot write into {folder}: {near} is a file. Name another place")
    if not os.access(near, os.W_OK | os.X_OK):
        raise CannotWrite(f"cannot write into {near}: permission denied. Name another place")


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turns what the system says of a failed write into CannotWrite."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        raise CannotWrite(
            f"cannot write {path}: {reason}. What was there before is unchanged. Make room, or "
            "name another place, and run the same command again"
        ) from error


def _temporary(path: Path, kind: str) -> Path:
    """Where this process keeps a new or an old version of `path` while it replaces it."""
    return path.with_name(f".{path.name[:100]}.{os.getpid()}.{kind}")


def _sweep(path: Path) -> None:
    """Remove what killed processes left under temporary names of `path`.

    A folder that was moved aside and never replaced comes back first.
    """
    for kind in ("old", "new"):
        for left in path.parent.glob(f".{glob.escape(path.name[:100])}.*.{kind}"):
            with contextlib.suppress(OSError, ValueError):
                if _runs(int(left.name.split(".")[-2])):
                    continue
                if kind == "old" and not path.exists():
                    left.rename(path)
                elif time.time() - left.stat().st_mtime > _STALE_S:
                    shutil.rmtree(left)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _to_disk(path: Path) -> None:
    """Have the system write out a file or a folder's entries, where it can."""
    try:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        if not path.is_dir() or error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise  # Windows opens no folders, and some file systems write out none
