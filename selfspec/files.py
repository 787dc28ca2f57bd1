"""How selfspec writes files, whole or not at all, and reads those of strangers, with bounds.

A file or folder is renamed into place once it is on the disk. What this tool did not write is never
replaced, nor is a device, a link, what the command itself reads or, unless `overwrite` says so, a
finished result. What is read can neither hang, fill memory nor surprise. GGUF: `hub/gguf.py`.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import re
import shutil
import stat
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from selfspec.errors import CannotWrite, InvalidData, InvalidOption, SelfspecError, first_line

_OURS = re.compile(
    rb'\{\s*("index": \d+, )?"made_by": "selfspec( [a-z]+)?"'  # JSON, and lines of it
    rb'|.{8}\{"__metadata__":\{"made_by":"selfspec( [a-z]+)?"'  # safetensors
    rb"|# written by selfspec( [a-z]+)?\n"
    rb"|<!-- written by selfspec( [a-z]+)? -->\n"
    rb'|(?i:<!doctype html>)\s<html lang="en">\s?<head>\s?<meta charset="utf-8">\s?'
    rb'<meta name="generator" content="selfspec">'
    rb"|\x89PNG\r\n\x1a\n.{29}tEXtSoftware\0selfspec"
    rb"|<\?xml .{,800}<dc:creator>\s*<cc:Agent>\s*<dc:title>selfspec</dc:title>",
    re.DOTALL,
)
"""How each kind of file that selfspec writes begins. A mention of it somewhere is no such mark."""

_MARK_WITHIN = 2048  # bytes, in which every mark is whole
_KINDS = {
    stat.S_IFLNK: "a link",
    **dict.fromkeys((stat.S_IFCHR, stat.S_IFBLK), "a device"),
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}

MOST_BYTES = 64 << 20  # of a text file that is read as a whole
MOST_LINE_BYTES = 16 << 20  # of one line of a JSONL file
MOST_TEMPLATE_CHARACTERS = 1 << 16  # of a chat template; those of models have some thousand
MOST_DEPTH = 64  # lists and mappings inside each other
MOST_YAML_BYTES = 1 << 20  # a config has a few hundred; YAML is a hundred times as slow as JSON
MOST_HEADER_BYTES = 16 << 20  # of a safetensors file; a model of 100,000 tensors stays below
_MOST_YAML_WORD = 10_000  # characters of a plain scalar: numbers with colons take quadratic time
_PIECE = 1 << 24  # bytes read at once: a read of a gigabyte gets a buffer of it at once


def cache_folder() -> Path:
    """The folder for files that can be made again: $XDG_CACHE_HOME or ~/.cache, then selfspec."""
    return local_path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "selfspec"


def cores(limit: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Cores that this process may use: fewer than there are under taskset, or in a container."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # no such file, or "max": no limit
        quota, period = map(int, limit.read_text().split())
        own = max(1, min(own, round(quota / period)))
    return own


def local_path(name: str | Path) -> Path:
    """A name as a path, `~` replaced. Raises InvalidOption for "", or where no such home is."""
    if not str(name).strip():  # to pathlib that is the current folder
        raise InvalidOption("the name of a file is empty")
    try:
        path = Path(name).expanduser()
        path.exists()
    except (RuntimeError, ValueError) as error:
        raise InvalidOption(f"{str(name)!r} names no file: {first_line(error)}") from error
    except OSError as error:
        raise InvalidOption(f"cannot use {str(name)!r}: {error.strerror}") from error
    return path


def is_url(name: object) -> bool:
    """Whether it names no file of this machine."""
    return "://" in str(name)


def sha256(path: Path, begin: bytes = b"", size: int = sys.maxsize) -> str:
    """The hash of `begin` and a file's first bytes. Raises InvalidData where it cannot be read."""
    found = hashlib.sha256(begin)
    with open_bytes(path) as file:
        while block := file.read(min(1 << 20, size)):
            found.update(block)
            size -= len(block)
    return found.hexdigest()


# --- before long work begins


def check_file(path: str | Path, *, overwrite: bool = False, reads: Iterable[object] = ()) -> Path:
    """`path`, if a file may be written there; asked before the work that ends in it.

    Raises CannotWrite for what can be no file, one that the command `reads` (values of any kind,
    those that name files count), one that selfspec did not write, or without `overwrite` did.
    """
    path = _named(path)
    _refuse_special(path)
    if path.is_dir():
        raise CannotWrite(f"{path} is a folder. Name a file")
    refuse_inputs([path], reads)
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
    reads: Iterable[object] = (),
) -> Path:
    """`folder`, if files called `names` may be written into it; asked before the work.

    `is_ours` says of a folder with some of these names whether selfspec made it. Raises CannotWrite
    as `check_file` does.
    """
    folder = _named(folder)
    _refuse_special(folder)
    _require_writable(folder)
    paths = [folder / name for name in sorted(names)]
    for path in paths:
        _refuse_special(path)
    refuse_inputs(paths, reads)
    if there := [path.name for path in paths if path.exists()]:
        holds = f"{folder} holds {there[0]}"
        if not is_ours(folder):
            raise CannotWrite(f"{holds}, which selfspec did not write. Name another folder")
        if not overwrite:
            raise CannotWrite(f"{holds} already. Give --overwrite or another one")
    return folder


def refuse_inputs(outputs: Iterable[Path], reads: Iterable[object]) -> None:
    """Raise CannotWrite where one of `outputs` is a file that `reads` names, by whatever name.

    Values of `reads` that are no names are passed over; commas part several names.
    """
    texts = [str(value) for value in reads if isinstance(value, str | Path)]
    names = [name for text in texts for name in (text, *text.split(","))]
    for path, name in itertools.product(outputs, names):
        with suppress(OSError, ValueError, RuntimeError):  # names no file
            if path.samefile(Path(name).expanduser()):
                said = f"{path} is read by the same command, as {name}"
                raise CannotWrite(f"{said}. Name another output")


def written_here(path: Path) -> bool:
    """Whether a file begins as those that selfspec writes, or is empty."""
    try:
        with path.open("rb") as file:
            begin = file.read(_MARK_WITHIN)
    except OSError:
        return False
    return not begin or _OURS.match(begin) is not None


def open_to_others(file: Path) -> Path | None:
    """What lets other users than root put something at `file`, there or not; None: nothing does.

    The file and its folder must be ours alone. Folders around them may be open to our group, as a
    loose umask leaves them: what somebody puts there in place of ours is theirs, and is seen to be.
    `file` is reached without links.
    """
    for place in (file, *file.parents):
        if place == file and not os.path.lexists(place):
            continue
        found, loose = place.lstat(), 0o022
        if place not in (file, file.parent):  # in /tmp and its like others rename nothing of ours
            loose = 0 if found.st_mode & stat.S_ISVTX else 0o002
        if found.st_mode & loose or found.st_uid not in (0, os.geteuid()):
            return place
    return None


# --- writing


def write(path: Path, content: str | bytes) -> None:
    """Replace the file at `path`, making the folders around it. Raises CannotWrite."""
    data = content.encode("utf-8") if isinstance(content, str) else content
    with replacing(path) as new:
        new.write_bytes(data)


def append(path: Path, line: str) -> None:
    """Add a line to a file, whole or not at all; the line feed is added. Raises CannotWrite."""
    with appended(path, f"{line}\n".encode()):
        pass


@contextmanager
def appended(path: Path, data: bytes) -> Iterator[IO[bytes]]:
    """A file with `data` at its end, unless the disk or the block fails. Raises CannotWrite."""
    with _explained(path):
        _refuse_special(path)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
        with open(os.open(path, flags, 0o666), "ab", buffering=0) as file:  # noqa: PTH123  # a descriptor
            size = os.fstat(file.fileno()).st_size
            try:
                while data:
                    data = data[file.write(data) :]
                yield file
            except BaseException:
                with suppress(OSError):
                    file.truncate(size)
                raise


@contextmanager
def replacing(path: Path, *, private: bool = False) -> Iterator[Path]:
    """A temporary place with the same file name, whose file then takes the place of `path`.

    It lies in a folder of its own, so that whatever a library puts next to it while it writes
    (safetensors does) is cleared with it. It gets the mode of what it replaces, else what the umask
    gives; `private`: only its owner's. After an error, CannotWrite or another, `path` is as it was.
    """
    with _room(path) as room:
        new = room / path.name
        new.touch()  # with what the umask gives; a library may make a file that has less
        mode = 0o600 if private else _mode(path if path.exists() else new)
        yield new
        new.chmod(mode)
        _to_disk(new)
        new.replace(path)


@contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """A new folder, which takes the place of `folder` as a whole or not at all."""
    with _room(folder) as room:
        new, old, probe = room / "filled", room / _ASIDE, room / "probe"
        new.mkdir()
        probe.touch()
        usual = {True: _mode(new), False: _mode(probe)}
        yield new
        for file in (new, *new.rglob("*")):
            before = folder / file.relative_to(new)
            file.chmod(_mode(before) if before.exists() else usual[file.is_dir()])
            _to_disk(file)
        try:
            if folder.exists():
                folder.rename(old)
            new.rename(folder)
        except BaseException:
            if old.exists():
                old.rename(folder)
            raise


@contextmanager
def locked(output: Path, *, wait: bool = False) -> Iterator[None]:
    """While open, no other process may write `output`, a file or a folder.

    A lock ends with its process, however that ends. Raises CannotWrite while another one holds it,
    unless told to `wait` for that. What killed processes left there and in it is cleared away.
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
            busy = f"{output} is being written by another process"
            raise CannotWrite(f"{busy}. Wait for it, or name another output") from error
    try:
        _sweep(output)
        yield
    finally:
        with suppress(OSError):  # Windows removes no open files
            place.unlink(missing_ok=True)
        lock.release()


def _named(path: str | Path) -> Path:
    if "\0" in str(path):
        raise CannotWrite(f"the output's name {str(path)!r} holds a zero byte. Name another one")
    try:
        return local_path(path)
    except InvalidOption as error:
        raise CannotWrite(f"{error}. Name another place") from error


def _refuse_special(path: Path) -> None:
    """Raise CannotWrite for what is neither a plain file, a folder, nor free."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise CannotWrite(f"cannot write {path}: {error.strerror}. Name another one") from error
    if words := _KINDS.get(stat.S_IFMT(mode)):
        raise CannotWrite(f"{path} is {words}, which selfspec does not replace. Name a file")


def _require_writable(folder: Path) -> None:
    """Raise CannotWrite unless `folder`, or the nearest one around it that exists, takes files."""
    near = folder
    try:  # permissions do not say it: root may write in /proc, which takes no files
        near = next(entry for entry in (folder, *folder.absolute().parents) if entry.exists())
        tempfile.TemporaryFile(dir=near).close()
    except OSError as error:
        why = f"it takes no files ({error.strerror})"
        raise CannotWrite(f"cannot write into {near}: {why}. Name another place") from error


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turns what the system says of a failed write into CannotWrite."""
    try:
        yield
    except Exception as error:
        failed = isinstance(error, OSError | SafetensorError) or "(os error " in str(error)  # Rust
        if isinstance(error, SelfspecError) or not failed:
            raise
        reason = getattr(error, "strerror", None) or first_line(error)
        raise CannotWrite(
            f"cannot write {path}: {reason}. What was there before is unchanged. Make room, or "
            "name another place, and run the same command again"
        ) from error


@contextmanager
def _room(path: Path) -> Iterator[Path]:
    """An empty folder beside `path` that this process alone can enter, for as long as the block.

    Nobody can foretell its name and lay a link there. Errors are explained as those of `path`.
    """
    with _explained(path):
        _refuse_special(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        _sweep(path)
        room = Path(tempfile.mkdtemp(".tmp", f".{path.name[:100]}.", path.parent))
        lock = FileLock(room / _LOCK, timeout=0)
        try:
            with suppress(OSError, NotImplementedError):  # a file system without locks
                lock.acquire()
            room = room.rename(room.with_suffix(".new"))  # found by others from now on
            yield room
            _to_disk(path.parent)
        finally:
            lock.release()
            shutil.rmtree(room, ignore_errors=True)


_ROOM = re.compile(r"\.(.+)\.[a-z0-9_]{8}\.new", re.DOTALL)  # with the name of what it is for
_LOCK = ".lock"  # in a room: held while its process lives
_ASIDE = "aside"  # in a room: the folder that is being replaced


def _mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def _sweep(path: Path) -> None:
    """Remove what killed processes left beside and in `path`, under longer names too (`.partial`).

    A folder that was moved aside and never replaced comes back first.
    """
    name = path.name[:100]
    for room in (*path.parent.glob(".*.new"), *path.glob(".*.new"), *path.glob("*/.*.new")):
        if room.is_symlink() or not (made := _ROOM.fullmatch(room.name)):
            continue
        beside = room.parent == path.parent
        own = beside and made[1] == name
        if beside and not own and not made[1].startswith(f"{name}."):
            continue
        with suppress(OSError, NotImplementedError):
            with FileLock(room / _LOCK, timeout=0):
                pass  # nobody else has it: its process is gone
            aside = room / _ASIDE
            if own and aside.is_dir() and not path.exists():
                aside.rename(path)
            if own or not aside.exists():  # what another output had aside is for that
                shutil.rmtree(room)


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


# --- reading


def open_bytes(path: Path) -> IO[bytes]:
    """A file, or a pipe that somebody writes to. Raises InvalidData for a folder, device, nothing.

    Never waits for somebody to open the other end of a pipe: such a pipe is empty.
    """
    try:
        number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        raise InvalidData(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:  # a zero byte in the name
        raise InvalidData(f"cannot read {str(path)!r}: {error}") from error
    mode = os.fstat(number).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
        os.close(number)
        raise InvalidData(f"{path} is {'a folder' if stat.S_ISDIR(mode) else 'a device'}, no file")
    os.set_blocking(number, True)
    return os.fdopen(number, "rb")


def read_bytes(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """A file as a whole. Raises InvalidData: unreadable, or too large."""
    with open_bytes(path) as file:
        try:
            data = b""
            while len(data) <= most_bytes and (piece := file.read(min(_PIECE, most_bytes + 1))):
                data += piece
        except OSError as error:
            raise InvalidData(f"cannot read {path}: {error.strerror}") from error
    if len(data) > most_bytes:
        raise InvalidData(f"{path} has more than {most_bytes} bytes, the most that is read")
    return data


def read_text(path: Path, most_bytes: int = MOST_BYTES) -> str:
    """A UTF-8 file as a whole, without a byte order mark. Raises InvalidData for any other."""
    try:
        return read_bytes(path, most_bytes).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidData(f"{path} is not UTF-8: byte {error.start} is wrong") from error


def read_json(path: Path, most_bytes: int = MOST_BYTES) -> Any:
    """Plain values. Raises InvalidData: as `read_text`, not JSON, or nested too deeply."""
    return parse_json(read_text(path, most_bytes), str(path))


def parse_json(text: str, where: str) -> Any:
    """Plain values. Raises InvalidData that names `where`: no JSON, too deep, half a character."""
    try:
        value = json.loads(text)
        if text.count("[") + text.count("{") > MOST_DEPTH and _depth(value) > MOST_DEPTH:
            raise RecursionError
        if "\\ud" in text or "\\uD" in text:  # else no string can hold a lone surrogate
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError as error:
        raise InvalidData(f"{where} is nested too deeply") from error
    except UnicodeEncodeError as error:
        raise InvalidData(f"{where} holds half a character, a lone surrogate") from error
    except ValueError as error:
        raise InvalidData(f"{where} is not JSON: {error}") from error
    return value


def json_lines(path: Path, most_bytes: int = MOST_LINE_BYTES) -> Iterator[tuple[int, str]]:
    """Number, from 1, and text of each line that is not blank, one in memory at a time.

    Only a line feed ends a line. Raises InvalidData: unreadable, not UTF-8, or a line too long.
    """
    with open_bytes(path) as file:
        for number in itertools.count(1):
            try:
                data = file.readline(most_bytes + 1)
                line = data.decode("utf-8-sig" if number == 1 else "utf-8")
            except OSError as error:
                raise InvalidData(f"cannot read {path}: {error.strerror}") from error
            except UnicodeDecodeError as error:
                raise InvalidData(f"{path}, line {number} is not UTF-8") from error
            if not data:
                return
            if len(data) > most_bytes:
                raise InvalidData(f"{path}, line {number} has more than {most_bytes} bytes")
            if line.strip():
                yield number, line.removesuffix("\n")


def _depth(value: Any) -> int:
    """Lists and mappings inside each other."""
    depth, level = 0, [value]
    while level := [one for one in level if type(one) in (dict, list)]:
        inner = (one.values() if type(one) is dict else one for one in level)
        level, depth = list(itertools.chain.from_iterable(inner)), depth + 1
    return depth


def read_yaml(path: Path) -> Any:
    """Plain values; None for an empty file.

    Raises InvalidData: as `read_text`, not YAML, nested too deeply, with an alias, or a key twice.
    """
    import yaml

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # the fast one, if it is there
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
            if keys and (most := keys.most_common(1)[0])[1] > 1:
                raise InvalidData(f"{path} has the key {most[0]!r} twice")
            found: dict[Any, Any] = super().construct_mapping(node, deep)
            return found

    text, depth = read_text(path, MOST_YAML_BYTES), 0
    try:
        for event in yaml.parse(text, Loader=Loader):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > MOST_DEPTH:
                raise InvalidData(f"{path} is nested too deeply")
            if isinstance(event, yaml.AliasEvent):
                raise InvalidData(f"{path} has the alias *{event.anchor}. Write out its value")
            word = event.value if isinstance(event, yaml.ScalarEvent) and event.implicit[0] else ""
            if len(word) > _MOST_YAML_WORD:
                raise InvalidData(f"{path} has a word of more than {_MOST_YAML_WORD} characters")
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise InvalidData(f"{path} is not YAML: {error}") from error
    except (ValueError, OverflowError, TypeError, LookupError, AttributeError) as error:
        # a date, number or tag that looks like one and is none: PyYAML passes these through
        raise InvalidData(f"{path} holds a value that YAML cannot read: {error}") from error


@contextmanager
def open_safetensors(path: Path) -> Iterator[Any]:
    """A file of tensors, its header read. Raises InvalidData for damaged files.

    The library itself checks names, shapes, types and places against the file's size; headers of
    up to 100 MB, which it takes half a minute to read, are refused here.
    """
    from safetensors import safe_open

    with open_bytes(path) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise InvalidData(f"{path} is a pipe, expected a file of tensors")
        size = int.from_bytes(file.read(8), "little")
    if size > MOST_HEADER_BYTES:
        said = f"it says that its header has {size} bytes, more than {MOST_HEADER_BYTES}"
        raise InvalidData(f"{path} is no file of tensors: {said}")
    try:
        with safe_open(path, "numpy") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        raise InvalidData(f"{path} is no whole file of tensors: {error}") from error


def check_safetensors(path: Path) -> dict[str, tuple[str, list[int]]]:
    """Types, as the format calls them, and shapes by name. Raises InvalidData for damaged files."""
    with open_safetensors(path) as opened:
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  # a file, no dict
        return {name: (one.get_dtype(), one.get_shape()) for name, one in slices.items()}
