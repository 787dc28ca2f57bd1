"""Write files, whole or not at all, and read untrusted files with limits.

A file or folder is renamed into place once it is on the disk. A file that this tool did not write
is never replaced, nor is a device, a link, an input of the same command or, without `overwrite`, a
finished result. Reading a file can neither hang nor fill the memory. GGUF: `hub/gguf.py`.
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
"""The beginning of each kind of file that selfspec writes; it counts only at the file's start."""

_MARK_WITHIN = 2048  # first bytes of a file, which hold the whole mark
_KINDS = {
    stat.S_IFLNK: "a link",
    **dict.fromkeys((stat.S_IFCHR, stat.S_IFBLK), "a device"),
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}

MOST_BYTES = 64 << 20  # in a text file that is read as a whole
MOST_LINE_BYTES = 16 << 20  # in one line of a JSONL file
MOST_TEMPLATE_CHARACTERS = 1 << 16  # in a chat template; models' templates have a few thousand
MOST_DEPTH = 64  # of nested lists and mappings
MOST_YAML_BYTES = 1 << 20  # a config has a few hundred; YAML is a hundred times as slow as JSON
MOST_HEADER_BYTES = 16 << 20  # in a safetensors header; a model of 100,000 tensors needs less
_MOST_YAML_WORD = 10_000  # characters in a plain scalar: numbers with colons take quadratic time
_PIECE = 1 << 24  # bytes per read: reading a gigabyte at once allocates a gigabyte at once


def cache_folder() -> Path:
    """The folder for files that can be made again: $XDG_CACHE_HOME or ~/.cache, then selfspec."""
    return local_path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "selfspec"


def cores(limit: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Cores that this process may use, which taskset or a container may limit."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # no such file, or "max": no limit
        quota, period = map(int, limit.read_text().split())
        cpus = max(1, min(cpus, round(quota / period)))
    return cpus


def local_path(name: str | Path) -> Path:
    """A name as a path, with `~` expanded. Raises InvalidOption for "" or an unknown home."""
    if not str(name).strip():  # pathlib would take the current folder
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
    """Whether a name is a URL, not a local file."""
    return "://" in str(name)


def sha256(path: Path, prefix: bytes = b"", size: int = sys.maxsize) -> str:
    """The hash of `prefix` and a file's first bytes. Raises InvalidData if it cannot be read."""
    digest = hashlib.sha256(prefix)
    with open_bytes(path) as file:
        while block := file.read(min(1 << 20, size)):
            digest.update(block)
            size -= len(block)
    return digest.hexdigest()


# --- checks before long work begins


def check_file(path: str | Path, *, overwrite: bool = False, reads: Iterable[object] = ()) -> Path:
    """Return `path` if a file may be written there; called before the work that produces it.

    Raises CannotWrite if `path` cannot be a file, is a file that the command `reads` (other values
    there are ignored), was not written by selfspec, or exists and `overwrite` is False.
    """
    path = _output_path(path)
    _refuse_special(path)
    if path.is_dir():
        raise CannotWrite(f"{path} is a folder. Name a file")
    refuse_inputs([path], reads)
    if path.exists():
        if not is_own_file(path):
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
    """Return `folder` if files called `names` may be written into it; called before the work.

    `is_ours` tells whether selfspec made a folder that has some of these files. Raises CannotWrite
    as `check_file` does.
    """
    folder = _output_path(folder)
    _refuse_special(folder)
    _require_writable(folder)
    paths = [folder / name for name in sorted(names)]
    for path in paths:
        _refuse_special(path)
    refuse_inputs(paths, reads)
    if clashes := [path.name for path in paths if path.exists()]:
        reason = f"{folder} holds {clashes[0]}"
        if not is_ours(folder):
            raise CannotWrite(f"{reason}, which selfspec did not write. Name another folder")
        if not overwrite:
            raise CannotWrite(f"{reason} already. Give --overwrite or another one")
    return folder


def refuse_inputs(outputs: Iterable[Path], reads: Iterable[object]) -> None:
    """Raise CannotWrite if one of `outputs` is a file that `reads` names, even by another path.

    Values in `reads` that name no file are ignored; one value may hold several names with commas.
    """
    texts = [str(value) for value in reads if isinstance(value, str | Path)]
    names = [name for text in texts for name in (text, *text.split(","))]
    for path, name in itertools.product(outputs, names):
        with suppress(OSError, ValueError, RuntimeError):  # names no file
            if path.samefile(Path(name).expanduser()):
                reason = f"{path} is read by the same command, as {name}"
                raise CannotWrite(f"{reason}. Name another output")


def is_own_file(path: Path) -> bool:
    """Whether a file is empty or begins like a file that selfspec writes."""
    try:
        with path.open("rb") as file:
            start = file.read(_MARK_WITHIN)
    except OSError:
        return False
    return not start or _OURS.match(start) is not None


def unsafe_path(file: Path) -> Path | None:
    """The file or folder that lets users other than root replace or create `file`; None if none.

    Only we may write the file and its folder. Outer folders may be writable by our group, as with a
    loose umask: if somebody replaces our folder there, the new one's owner shows it. The path of
    `file` has no links.
    """
    for path in (file, *file.parents):
        if path == file and not os.path.lexists(path):
            continue
        status, mask = path.lstat(), 0o022
        if path not in (file, file.parent):  # in a sticky folder (/tmp) others cannot rename ours
            mask = 0 if status.st_mode & stat.S_ISVTX else 0o002
        if status.st_mode & mask or status.st_uid not in (0, os.geteuid()):
            return path
    return None


# --- writing


def write(path: Path, content: str | bytes) -> None:
    """Replace the file at `path`, making the folders around it. Raises CannotWrite."""
    data = content.encode("utf-8") if isinstance(content, str) else content
    with replacing(path) as file:
        file.write_bytes(data)


def append(path: Path, content: str | bytes) -> None:
    """Append a line, or bytes as they are, whole or not at all. Raises CannotWrite."""
    data = f"{content}\n".encode() if isinstance(content, str) else content
    with _explain_errors(path):
        _refuse_special(path)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
        with open(os.open(path, flags, 0o666), "ab", buffering=0) as file:  # noqa: PTH123  # a descriptor
            size = os.fstat(file.fileno()).st_size
            try:
                while data:
                    data = data[file.write(data) :]
                os.fsync(file.fileno())
            except BaseException:
                with suppress(OSError):
                    file.truncate(size)
                raise


@contextmanager
def replacing(path: Path, *, private: bool = False) -> Iterator[Path]:
    """A temporary file of the same name, which replaces `path` when the block ends.

    It is in a folder of its own, which is removed with anything that a library writes beside it (as
    safetensors does). It gets the mode of the file that it replaces, else that of the umask;
    `private`: of its owner alone. After any error, CannotWrite or another, `path` is unchanged.
    """
    with _room(path) as room:
        file = room / path.name
        file.touch()  # with the umask's mode; a library may make a file with a stricter one
        mode = 0o600 if private else _mode(path if path.exists() else file)
        yield file
        file.chmod(mode)
        _flush(file)
        file.replace(path)


@contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """A new folder, which replaces `folder` when the block ends, as a whole or not at all."""
    with _room(folder) as room:
        new, old, probe = room / "filled", room / _ASIDE, room / "probe"
        new.mkdir()
        probe.touch()
        modes = {True: _mode(new), False: _mode(probe)}
        yield new
        for file in (new, *new.rglob("*")):
            original = folder / file.relative_to(new)
            file.chmod(_mode(original) if original.exists() else modes[file.is_dir()])
            _flush(file)
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
    """Lock `output`, a file or a folder, against other processes that write it.

    The lock ends with its process, however that ends. Raises CannotWrite if another process holds
    it, unless `wait` is set. Removes leftovers of killed processes beside and in `output`.
    """
    file = output.with_name(f".{output.name[:100]}.lock")
    if output.is_dir() and not os.access(file.parent, os.W_OK):
        file = output / ".lock"
    lock = FileLock(file, timeout=-1 if wait else 0)
    with _explain_errors(output):
        _refuse_special(output)
        file.parent.mkdir(parents=True, exist_ok=True)
        _refuse_special(file)
        try:
            lock.acquire()
            while not file.exists():  # its last holder removed it between our open and our lock
                lock.release()
                lock.acquire()
        except Timeout as error:
            reason = f"{output} is being written by another process"
            raise CannotWrite(f"{reason}. Wait for it, or name another output") from error
    try:
        _sweep(output)
        yield
    finally:
        with suppress(OSError):  # Windows removes no open files
            file.unlink(missing_ok=True)
        lock.release()


def _output_path(path: str | Path) -> Path:
    if "\0" in str(path):
        raise CannotWrite(f"the output's name {str(path)!r} holds a zero byte. Name another one")
    try:
        return local_path(path)
    except InvalidOption as error:
        raise CannotWrite(f"{error}. Name another place") from error


def _refuse_special(path: Path) -> None:
    """Raise CannotWrite if `path` exists and is neither a regular file nor a folder."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise CannotWrite(f"cannot write {path}: {error.strerror}. Name another one") from error
    if kind := _KINDS.get(stat.S_IFMT(mode)):
        raise CannotWrite(f"{path} is {kind}, which selfspec does not replace. Name a file")


def _require_writable(folder: Path) -> None:
    """Raise CannotWrite unless files can be made in `folder`, or its nearest existing parent."""
    place = folder
    try:  # permissions do not tell: root may write in /proc, but no files can be made there
        place = next(entry for entry in (folder, *folder.absolute().parents) if entry.exists())
        tempfile.TemporaryFile(dir=place).close()
    except OSError as error:
        reason = f"it takes no files ({error.strerror})"
        raise CannotWrite(f"cannot write into {place}: {reason}. Name another place") from error


@contextmanager
def _explain_errors(path: Path) -> Iterator[None]:
    """Turn the system's error for a failed write into CannotWrite."""
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
    """An empty folder beside `path` that only this process's user can enter, until the block ends.

    Its name is random, so nobody can plant a link there. Errors are reported as those of `path`.
    """
    with _explain_errors(path):
        _refuse_special(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        _sweep(path)
        room = Path(tempfile.mkdtemp(".tmp", f".{path.name[:100]}.", path.parent))
        lock = FileLock(room / _LOCK, timeout=0)
        try:
            with suppress(OSError, NotImplementedError):  # a file system without locks
                lock.acquire()
            room = room.rename(room.with_suffix(".new"))  # from now on, others find it
            yield room
            _flush(path.parent)
        finally:
            lock.release()
            shutil.rmtree(room, ignore_errors=True)


_ROOM = re.compile(r"\.(.+)\.[a-z0-9_]{8}\.new", re.DOTALL)  # with the name of its output
_LOCK = ".lock"  # in a room: locked while its process lives
_ASIDE = "aside"  # in a room: the folder that is being replaced


def _mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def _sweep(path: Path) -> None:
    """Remove leftovers of killed processes beside and in `path`, also of `path.partial` and so on.

    First, a folder that was moved aside and not replaced is moved back.
    """
    name = path.name[:100]
    for room in (*path.parent.glob(".*.new"), *path.glob(".*.new"), *path.glob("*/.*.new")):
        if room.is_symlink() or not (match := _ROOM.fullmatch(room.name)):
            continue
        beside = room.parent == path.parent
        of_path = beside and match[1] == name
        if beside and not of_path and not match[1].startswith(f"{name}."):
            continue
        with suppress(OSError, NotImplementedError):
            with FileLock(room / _LOCK, timeout=0):
                pass  # the lock is free: its process is gone
            aside = room / _ASIDE
            if of_path and aside.is_dir() and not path.exists():
                aside.rename(path)
            if of_path or not aside.exists():  # a folder of another output is restored with that
                shutil.rmtree(room)


def _flush(path: Path) -> None:
    """Flush a file or a folder's entries to the disk, if the system can."""
    try:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        if not path.is_dir() or error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise  # Windows cannot open folders, and some file systems cannot flush them


# --- reading


def open_bytes(path: Path) -> IO[bytes]:
    """Open a file or a pipe. Raises InvalidData for a folder, a device or a missing file.

    Never waits for a writer to open the other end of a pipe: without one, the pipe is empty.
    """
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        raise InvalidData(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:  # a zero byte in the name
        raise InvalidData(f"cannot read {str(path)!r}: {error}") from error
    mode = os.fstat(handle).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
        os.close(handle)
        raise InvalidData(f"{path} is {'a folder' if stat.S_ISDIR(mode) else 'a device'}, no file")
    os.set_blocking(handle, True)
    return os.fdopen(handle, "rb")


def read_bytes(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """Read a whole file. Raises InvalidData if it is unreadable or too large."""
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
    """Read a whole UTF-8 file, without its byte order mark. Raises InvalidData for any other."""
    try:
        return read_bytes(path, most_bytes).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidData(f"{path} is not UTF-8: byte {error.start} is wrong") from error


def read_json(path: Path, most_bytes: int = MOST_BYTES) -> Any:
    """Read a JSON file. Raises InvalidData as `read_text` and `parse_json` do."""
    return parse_json(read_text(path, most_bytes), str(path))


def parse_json(text: str, label: str) -> Any:
    """Parse JSON. Raises InvalidData, naming `label`: not JSON, too deep, or a lone surrogate."""
    try:
        value = json.loads(text)
        if text.count("[") + text.count("{") > MOST_DEPTH and _depth(value) > MOST_DEPTH:
            raise RecursionError
        if "\\ud" in text or "\\uD" in text:  # else no string can hold a lone surrogate
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError as error:
        raise InvalidData(f"{label} is nested too deeply") from error
    except UnicodeEncodeError as error:
        raise InvalidData(f"{label} holds half a character, a lone surrogate") from error
    except ValueError as error:
        raise InvalidData(f"{label} is not JSON: {error}") from error
    return value


def json_lines(path: Path, most_bytes: int = MOST_LINE_BYTES) -> Iterator[tuple[int, str]]:
    """The number, from 1, and the text of each line that is not blank, one in memory at a time.

    Only a line feed ends a line. Raises InvalidData: unreadable, not UTF-8, or a line too long.
    """
    with open_bytes(path) as file:
        for number in itertools.count(1):
            try:
                if len(data := file.readline(most_bytes + 1)) > most_bytes:
                    raise InvalidData(f"{path}, line {number} has more than {most_bytes} bytes")
                line = data.decode("utf-8-sig" if number == 1 else "utf-8")
            except OSError as error:
                raise InvalidData(f"cannot read {path}: {error.strerror}") from error
            except UnicodeDecodeError as error:
                raise InvalidData(f"{path}, line {number} is not UTF-8") from error
            if not data:
                return
            if line.strip():
                yield number, line.removesuffix("\n")


def _depth(value: Any) -> int:
    """How deep lists and mappings are nested."""
    depth, level = 0, [value]
    while level := [entry for entry in level if type(entry) in (dict, list)]:
        inner = (entry.values() if type(entry) is dict else entry for entry in level)
        level, depth = list(itertools.chain.from_iterable(inner)), depth + 1
    return depth


def read_yaml(path: Path) -> Any:
    """Read a YAML file; None if it is empty.

    Raises InvalidData: as `read_text`, not YAML, nested too deeply, with an alias, or a key twice.
    """
    import yaml

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # the fast one, if it is there
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
            if keys and (commonest := keys.most_common(1)[0])[1] > 1:
                raise InvalidData(f"{path} has the key {commonest[0]!r} twice")
            mapping: dict[Any, Any] = super().construct_mapping(node, deep)
            return mapping

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
    """Open a safetensors file and read its header. Raises InvalidData for damaged files.

    The library itself checks names, shapes, types and offsets against the file's size. It accepts
    headers of up to 100 MB, which take half a minute to read: these are refused here.
    """
    from safetensors import safe_open

    with open_bytes(path) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise InvalidData(f"{path} is a pipe, expected a file of tensors")
        size = int.from_bytes(file.read(8), "little")
    if size > MOST_HEADER_BYTES:
        reason = f"it says that its header has {size} bytes, more than {MOST_HEADER_BYTES}"
        raise InvalidData(f"{path} is no file of tensors: {reason}")
    try:
        with safe_open(path, "numpy") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        raise InvalidData(f"{path} is no whole file of tensors: {error}") from error


def check_safetensors(path: Path) -> dict[str, tuple[str, list[int]]]:
    """Types, as the format names them, and shapes by name. Raises InvalidData for damaged files."""
    with open_safetensors(path) as opened:
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  # a file, no dict
        return {name: (tensor.get_dtype(), tensor.get_shape()) for name, tensor in slices.items()}
