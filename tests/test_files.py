"""Files: atomic writes by one process at a time, only over our own files; reads with limits.

Every writer fills a folder twice, the second time over its own files: modes follow the umask, links
are not followed, and a full disk loses nothing.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import stat
import struct
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from selfspec import files
from selfspec.cli.chat import Chat
from selfspec.cli.generate import answer_all
from selfspec.errors import CannotWrite, InvalidData
from selfspec.eval import report
from selfspec.eval.results import ANSWERS
from selfspec.model.backbone import Backbone
from selfspec.training.fit import save_checkpoint
from selfspec.visualise import picture
from tests.bad_input import limited, snapshot
from tests.cli.fakes import FakeSpeculator
from tests.heads.kinds import make_heads
from tests.test_damage import FORMATS
from tests.traces import long_trace


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    (tmp_path / "out").write_text("# written by selfspec bench\n")
    return tmp_path / "out"


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, OSError])
def test_an_error_in_writing_leaves_the_old_files(ours: Path, error: type[BaseException]) -> None:
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


def test_a_killed_writer_holds_no_lock_and_its_temporary_files_are_removed(ours: Path) -> None:
    """safetensors first writes to a file of its own, which a killed process leaves behind."""
    before = snapshot(ours.parent)
    child = os.fork()
    if child == 0:
        with files.locked(ours), files.replacing(ours) as new:
            (new.parent / ".tmpX1y2Z3").write_text("half")
            os._exit(0)  # as if killed: no cleanup
    os.waitpid(child, 0)
    assert snapshot(ours.parent) != before
    with files.locked(ours):
        pass
    assert snapshot(ours.parent) == before


@pytest.mark.parametrize("place", ["fsync", "replace"])
def test_a_full_disk_is_named(ours: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = snapshot(ours.parent)
    full = Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    monkeypatch.setattr(os if place == "fsync" else Path, place, full)
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
    "name", ["", "  ", "zero\0byte", "~nobody-here/out", "out/below", "/dev/full", "/proc/x"]
)
def test_an_odd_name_is_refused(ours: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ours.parent)
    for check in (
        lambda: files.check_file(name, overwrite=True),
        lambda: files.check_folder(name, (), lambda _: True, overwrite=True),
    ):
        with pytest.raises(CannotWrite):
            check()


def test_an_output_has_one_writer(tmp_path: Path) -> None:
    with files.locked(tmp_path / "out"):
        with pytest.raises(CannotWrite, match="is being written by another process"):
            files.locked(tmp_path / "out").__enter__()
        assert [path.name for path in tmp_path.iterdir()] == [".out.lock"]
    assert list(tmp_path.iterdir()) == []


def test_leftovers_of_killed_processes_are_removed_or_restored(tmp_path: Path) -> None:
    for name in ("out.txt", "out.txt.run.json", "mine.txt"):
        (tmp_path / f".{name}.a_1bcdef.new").mkdir()
    files.write(tmp_path / "out.txt", "whole")
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"out.txt", ".mine.txt.a_1bcdef.new"}
    for name in ("folder", "folder.v2"):
        (tmp_path / f".{name}.a_1bcdef.new" / "aside").mkdir(parents=True)
        (tmp_path / f".{name}.a_1bcdef.new" / "aside" / "kept").write_text(name)
    for name in ("folder", "folder.v2"):
        with files.locked(tmp_path / name):
            assert (tmp_path / name / "kept").read_text() == name


def test_files_that_others_write_near_a_locked_output_stay(tmp_path: Path) -> None:
    for name in ("out.v2", "out/below", "out/some/where"):
        with files.replacing(tmp_path / name) as new, files.locked(tmp_path / "out"):
            new.write_text("whole")
        assert (tmp_path / name).read_text() == "whole"


def save_conversation(folder: Path, _: Backbone) -> None:
    speculator: Any = FakeSpeculator()
    Chat(speculator, {}, {"system": "be brief"}).save(str(folder / "talk.json"))


def fill_folder(folder: Path, _: Backbone) -> None:
    with files.replacing_folder(folder / "whole") as new:
        (new / "inner").mkdir()
        (new / "inner" / "text").write_text("words")
        save_checkpoint(new / "it.safetensors", {"a": torch.zeros(9)}, {"job": {}})


def finish_prompts(folder: Path, _: Backbone) -> None:
    if not (prompts := folder.parent / "prompts.jsonl").exists():
        prompts.write_text('{"prompt": "bad"}\n')
    options: Any = {"prompts": prompts, "output": folder / "answers.jsonl", "overwrite": True}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("selfspec.cli.base.load", lambda _: FakeSpeculator())
        answer_all(options, {"raw": True}, more=False)


WRITERS: dict[str, Callable[[Path, Backbone], object]] = {
    "text": lambda folder, _: files.write(folder / "it", "words\n"),
    "a line more": lambda folder, _: files.append(folder / "it", "words"),
    "a folder": fill_folder,
    "heads": lambda folder, backbone: make_heads("linear", backbone.unembedding).save(folder),
    "a checkpoint": FORMATS["a checkpoint"].make,
    "a run of data": FORMATS["a run of data"].make,
    "answers": finish_prompts,
    "a conversation": save_conversation,
    "a trace": FORMATS["a trace"].make,
    "a card": lambda folder, _: picture.save_card(long_trace(["a ", "b "]), folder / "it.png"),
    "a run of bench": lambda folder, _: report.begin_results(
        folder, {"run": {"seed": 0}}, overwrite=True
    ),
}


def modes(folder: Path) -> dict[Path, int]:
    return {path: stat.S_IMODE(path.stat().st_mode) for path in sorted(folder.rglob("*"))}


@pytest.fixture(params=[0o077, 0o002])
def mask(request: pytest.FixtureRequest) -> Iterator[int]:
    old = os.umask(request.param)
    yield request.param
    os.umask(old)


@pytest.mark.parametrize("writer", WRITERS)
def test_modes_follow_the_umask_and_are_kept(
    writer: str, tmp_path: Path, backbone: Backbone, mask: int
) -> None:
    WRITERS[writer](tmp_path, backbone)
    entries = modes(tmp_path)
    assert entries
    for path, mode in entries.items():
        assert mode == (0o777 if path.is_dir() else 0o666) & ~mask, path
        path.chmod(0o750 if path.is_dir() else 0o640)
    before = modes(tmp_path)
    WRITERS[writer](tmp_path, backbone)
    assert before.items() <= modes(tmp_path).items()


@pytest.mark.parametrize("writer", WRITERS)
def test_no_link_is_followed(writer: str, tmp_path: Path, backbone: Backbone) -> None:
    first, victim, trap, free = (tmp_path / name for name in ("first", "victim", "trap", "free"))
    for folder in (first, trap, free):
        folder.mkdir()
    WRITERS[writer](first, backbone)
    for number, name in enumerate(sorted(path.name for path in first.iterdir())):
        victim.write_text("mine")
        place = tmp_path / str(number)
        place.mkdir()
        (place / name).symlink_to(victim)
        before = snapshot(place)
        with pytest.raises(CannotWrite, match="is a link"):
            WRITERS[writer](place, backbone)
        assert victim.read_text() == "mine"
        assert before.items() <= snapshot(place).items()
    # nor a link planted under a temporary name that could be guessed
    for name in {path.name for path in first.rglob("*")}:
        (trap / name).symlink_to(victim)
        for end in (f"{os.getpid()}.new", f"{os.getpid()}.old", "new", "tmp"):
            (free / f".{name}.{end}").symlink_to(trap, target_is_directory=True)
    before = snapshot(trap)
    WRITERS[writer](free, backbone)
    assert victim.read_text() == "mine"
    assert snapshot(trap) == before


@pytest.mark.parametrize("writer", WRITERS)
def test_a_full_disk_leaves_the_old_files(writer: str, tmp_path: Path, backbone: Backbone) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    WRITERS[writer](kept, backbone)
    (kept / ANSWERS).touch()
    before = snapshot(kept)
    largest = max(path.stat().st_size for path in kept.rglob("*") if path.is_file())
    for room in (0, 1, largest // 2, largest - 1):
        for folder in (kept, tmp_path / f"new-{room}"):
            folder.mkdir(exist_ok=True)
            with limited(resource.RLIMIT_FSIZE, room), pytest.raises(CannotWrite):
                WRITERS[writer](folder, backbone)
        after = snapshot(kept)
        assert not [name for name in after if name.endswith((".new", ".lock"))]
        assert before.items() <= after.items(), "an old file is not what it was"


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="needs a second user")
@pytest.mark.parametrize("writer", ["text", "a folder", "a checkpoint", "a run of data"])
def test_a_folder_of_another_user(writer: str, backbone: Backbone) -> None:
    """A folder open to all takes our files; a closed folder gives an error of one line."""
    place = tempfile.TemporaryDirectory()  # other users may not enter pytest's
    folder = Path(place.name)
    folder.chmod(0o755)
    shared, closed = folder / "shared", folder / "closed"
    shared.mkdir()
    shared.chmod(0o1777)
    closed.mkdir(mode=0o755)
    "".encode("utf-8-sig")  # import now: user 65534 may not read Python's folder
    child = os.fork()
    if child == 0:
        os.setuid(65534)
        try:
            WRITERS[writer](shared, backbone)
            WRITERS[writer](shared, backbone)
            with pytest.raises(CannotWrite, match="ermission denied"):
                WRITERS[writer](closed, backbone)
            os._exit(0)
        except BaseException:  # noqa: BLE001  # the child must not go on with the tests
            traceback.print_exc()
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert {path.stat().st_uid for path in shared.rglob("*")} == {65534}
    assert not list(closed.iterdir())
    place.cleanup()


@pytest.mark.parametrize("writer", sorted({*WRITERS} - {"text", "a line more", "a folder"}))
def test_our_own_files_are_recognised(writer: str, tmp_path: Path, backbone: Backbone) -> None:
    """By their first bytes; a file that only mentions selfspec is a user's own."""
    marked = {"answers", "a conversation", "a trace", "a card", "a run of bench"}
    WRITERS[writer](tmp_path, backbone)
    marks = [files.is_own_file(path) for path in sorted(tmp_path.iterdir())]
    assert any(marks) is (writer in marked)


@pytest.mark.parametrize(
    "text",
    [
        "a stranger's",
        "notes on selfspec\n",
        '{"prompt": "a", "made_by": "selfspec generate"}\n',
        '{"made_by": "selfspecs"}\n',
        "# written by selfspec, about its options\n",
        "<!doctype html>\n<html><head><title>selfspec</title>",
        "\n# written by selfspec bench\n",
    ],
)
def test_mentioning_selfspec_is_no_mark(text: str, ours: Path) -> None:
    ours.write_text(text)
    with pytest.raises(CannotWrite, match="was not written by selfspec"):
        files.check_file(ours, overwrite=True)


def test_a_command_does_not_overwrite_its_inputs(tmp_path: Path) -> None:
    path = tmp_path / report.RUN
    path.write_text("# written by selfspec bench\n")
    (tmp_path / "link").symlink_to(path)
    (tmp_path / "hard").hardlink_to(path)
    others = [None, 3, "x" * 9000, "zero\0byte", "~nobody-here/x"]
    another_way = f"{tmp_path}/../{tmp_path.name}/{path.name}"
    aliases = [path, another_way, tmp_path / "link", f"{tmp_path}/hard", f"else.jsonl,{path}"]
    for alias in aliases:
        with pytest.raises(CannotWrite, match="is read by the same command"):
            files.check_file(path, overwrite=True, reads=[*others, alias])
        with pytest.raises(CannotWrite, match="is read by the same command"):
            report.check_results(tmp_path, overwrite=True, reads=[*others, alias])
    assert files.check_file(path, overwrite=True, reads=others) == path


# --- reading: files that are refused, with a line that names the file, and valid ones

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 8)}]\n" for n in range(1, 13)
)
"""Nested aliases: 8 to the 13th values."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "file"


def put(file: Path, content: str | bytes) -> Path:
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return file


def lines(file: Path) -> list[tuple[int, str]]:
    return list(files.json_lines(file, most_bytes=10))


YAML = [
    (BOMB, r"has the alias \*a0\. Write out its value"),
    ("[" * 10_000, "nest(ed too|ing)"),  # our message, or libyaml's
    ("a: 1\nb: 2\na: 3", "has the key 'a' twice"),
    ("x: 1" + ":10" * 10_000, "a word of more than"),
    ("a: b\n" * 300_000, "more than 1048576 bytes"),
    *((f"a: {text}", "a value that YAML") for text in ("9" * 9000, "!!bool x", "!!timestamp x")),
    *((f"a: {text}", "is not YAML") for text in ("!!python/object/apply:os.getcwd []", "\x00")),
    ("a: 1\n---\nb: 2", "is not YAML"),
    (b"a: \xff", "not UTF-8: byte 3"),
]
JSON = [
    ("", "is not JSON"),
    ("[" * 100_000, "nested too deeply"),
    ("[" * 65 + "[1]" + "]" * 65, "nested too deeply"),
    ('"\\ud800"', "lone surrogate"),
    ('{"\\uDFFF": 1}', "lone surrogate"),
    ("9" * 9000, "is not JSON"),
]
LINES = [
    ("1\n" + "2" * 20 + "\n", "line 2 has more than 10 bytes"),
    (b"1\n\xff\n", "line 2 is not UTF-8"),
    ("\u00e9" * 10, "line 1 has more than 10 bytes"),  # and not the half character at the cut
]


@pytest.mark.parametrize(
    ("read", "content", "words"),
    [
        (read, *case)
        for read, cases in ((files.read_yaml, YAML), (files.read_json, JSON), (lines, LINES))
        for case in cases
    ],
    ids=lambda value: str(value)[:20].encode("unicode_escape").decode(),
)
def test_reading_is_bounded(file: Path, read: Any, content: str | bytes, words: str) -> None:
    with pytest.raises(InvalidData, match=words) as caught:
        read(put(file, content))
    assert str(file) in str(caught.value)


def test_plain_yaml_is_read(file: Path) -> None:
    assert files.read_yaml(put(file, "")) is files.read_yaml(put(file, "# nothing\n")) is None
    text = b"\xef\xbb\xbfa: 'text'\nb: |\n  lines\n"
    assert files.read_yaml(put(file, text)) == {"a": "text", "b": "lines\n"}


def test_json_within_the_bounds_is_read() -> None:
    wide = [[n] for n in range(1000)]
    text = '{"a": "\\ud83d\\ude00", "b": ' + json.dumps(wide) + "}"
    assert files.parse_json(text, "it") == {"a": "\U0001f600", "b": wide}


def test_lines_come_with_their_numbers_and_without_blank_ones(file: Path) -> None:
    put(file, b'\xef\xbb\xbf1\r\n\n  \n"\xe2\x80\xa8"\n3')
    assert list(files.json_lines(file)) == [(1, "1\r"), (4, '"\u2028"'), (5, "3")]


@pytest.mark.parametrize(
    "read", [files.read_text, files.read_json, files.read_yaml, files.json_lines]
)
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("missing", "cannot read .*missing: No such file"),
        (".", "is a folder"),
        ("file/below", "cannot read"),
        ("x" * 5000, "cannot read"),
        ("zero\0byte", "cannot read"),
        ("loop", "cannot read"),
        ("/dev/zero", "is a device"),
    ],
)
def test_a_path_that_is_no_file_is_named(tmp_path: Path, read: Any, name: str, words: str) -> None:
    put(tmp_path / "file", "1")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(InvalidData, match=words):
        list(read(tmp_path / name))


def test_a_pipe_is_read_and_one_without_a_writer_is_empty(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "silent")
    assert files.read_text(tmp_path / "silent") == ""
    reader, writer = os.pipe()
    os.write(writer, b"text")
    os.close(writer)
    try:
        assert files.read_text(Path(f"/dev/fd/{reader}")) == "text"
    finally:
        os.close(reader)


def test_only_whole_tensors_after_a_small_header_are_accepted(file: Path) -> None:
    head = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    whole = struct.pack("<Q", len(head)) + head + bytes(8)
    assert files.check_safetensors(put(file, whole)) == {"a": ("F32", [2])}
    long = struct.pack("<Q", files.MOST_HEADER_BYTES + 1) + b"{}"
    for content, words in (
        *((damaged, "no whole file") for damaged in (b"", whole[:-1], whole + b"more")),
        (long, "says that its header has 16777217 bytes"),
    ):
        with pytest.raises(InvalidData, match=words):
            files.check_safetensors(put(file, content))
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(InvalidData, match="is a pipe"):
        files.check_safetensors(file)
