from __future__ import annotations

import gzip
import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from selfspec.errors import CannotWrite, InvalidData, InvalidOption
from selfspec.training.text import DROPPED, KEPT, Counts, Writer
from tests.authors import counted
from tests.bad_input import one_line, snapshot

OPTIONS = {"seed": 0, "shard": "1/1", "pair": (0.8, 1.0)}
LINES = [['{"a": "é"}', '{"a": 2}'], [], ['{"a": 3}']]


def opened(path: Path, **options: Any) -> Writer:
    return Writer(path, OPTIONS | options, {"torch": "1"})


def write(path: Path, first: int = 0, last: int = 3) -> Writer:
    writer = opened(path)
    for number in range(first, last):
        writer.append(LINES[number], number + 7, counted(rows=number))
    return writer


def record(path: Path) -> Path:
    return path.with_name(path.name + ".run.json")


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_batches_are_appended_and_recorded(tmp_path: Path, name: str) -> None:
    path = tmp_path / "new" / name
    writer = write(path)
    assert [entry["a"] for entry in writer.records()] == ["é", 2, 3]
    assert (writer.batches, writer.counts) == (3, counted(rows=2))
    state = json.loads(record(path).read_text())
    assert state["seeds"] == [7, 8, 9]
    assert state["bytes"] == path.stat().st_size
    assert (state["options"]["pair"], state["versions"]) == ([0.8, 1.0], {"torch": "1"})
    content = path.read_bytes()
    text = gzip.decompress(content) if name.endswith("gz") else content
    assert text.decode().splitlines() == [*LINES[0], *LINES[2]]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
@pytest.mark.parametrize("whole", [0, 1, 2])
@pytest.mark.parametrize("written", [0, 5, None])
def test_what_a_killed_run_left_behind_is_cut_off(
    tmp_path: Path, name: str, whole: int, written: int | None
) -> None:
    """The batch behind `whole` ones, as far as its first `written` bytes."""
    write(tmp_path / "expected" / name)
    path = tmp_path / name
    writer = write(path, 0, whole)
    block = writer._block(LINES[whole])
    writer._save(replace(writer._run, next=LINES[whole]))
    with path.open("ab") as file:
        file.write(block[:written])
    record(path).with_name(record(path).name + ".new").write_text("{")  # killed while writing it
    assert opened(path).batches == whole
    write(path, whole)
    assert path.read_bytes() == (tmp_path / "expected" / name).read_bytes()


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
@pytest.mark.parametrize("coming", [0, 1], ids=["whole", "killed"])
@pytest.mark.parametrize("added", [b'{"mi', b"\n", gzip.compress(b"mine\n", mtime=0)])
def test_lines_of_somebody_else_behind_ours_are_kept(
    tmp_path: Path, name: str, coming: int, added: bytes
) -> None:
    """After a whole run, and after one that was killed while it wrote a batch."""
    path = tmp_path / name
    writer = write(path)
    block = writer._block(LINES[0]) * coming
    writer._save(replace(writer._run, next=LINES[0] * coming))
    with path.open("ab") as file:
        file.write(block + added)
    before = path.read_bytes()
    with pytest.raises(InvalidData, match=r"what follows byte \d+ was not written"):
        opened(path)
    assert path.read_bytes() == before


def test_a_run_killed_before_its_first_batch_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    writer = opened(path)
    assert not any(tmp_path.iterdir()), "nothing is left of a run that could not begin"
    writer._save(replace(writer._run, next=LINES[0]))
    writer = write(path)
    assert list(writer.records()) == [{"a": "é"}, {"a": 2}, {"a": 3}]
    before = writer.counts
    writer.counts.add("", "rows")  # to a copy
    assert writer.counts == before


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"seed": 1}, "was begun with seed 0, not 1"),
        ({"pair": (0.8, 0.9)}, r"was begun with pair \[0.8, 1.0\], not \[0.8, 0.9\]"),
        ({"extra": 5}, "was begun with extra None, not 5"),
        ({"shard": None}, "was begun with shard 1/1, not None"),
    ],
)
def test_other_options_are_refused_by_name(
    tmp_path: Path, options: dict[str, Any], reason: str
) -> None:
    path = tmp_path / "a.jsonl"
    before = write(path).output.read_bytes()
    with pytest.raises(InvalidOption, match=reason):
        opened(path, **options)
    assert path.read_bytes() == before


def test_lost_lines_are_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InvalidData, match="Delete both to start over"):
        opened(path)


RECORD: dict[str, list[Any]] = {
    "format_version": [2, "2", None],
    "options": [None, []],
    "versions": [None, 3],
    "counts": [
        *(None, {"families": [1]}, {"families": {"a": {"rows": 1}}}),
        *({"families": {"": dict.fromkeys((*KEPT, *DROPPED), n)}} for n in ("many", -1)),
    ],
    "seeds": [None, ["a"], [-1]],
    "bytes": [None, "10", -1, True, 3, 10**9, 10**30],
    "more": [1],
}


@pytest.mark.parametrize(
    "change",
    [*("", [], {}, 5), *({name: value} for name, values in RECORD.items() for value in values)],
)
def test_a_strange_record_loses_no_line(tmp_path: Path, change: Any) -> None:
    path = tmp_path / "a.jsonl.gz"
    write(path, 0, 1)
    whole = json.loads(record(path).read_text())
    changed = isinstance(change, dict) and change.keys() <= RECORD.keys() and change
    record(path).write_text(json.dumps(whole | change if changed else change))
    before = snapshot(tmp_path)
    with pytest.raises(InvalidData) as caught:
        opened(path)
    one_line(caught, path)
    assert snapshot(tmp_path) == before


def test_other_versions_are_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path / "a.jsonl")
    with caplog.at_level(logging.WARNING):
        opened(tmp_path / "a.jsonl")
        assert not caplog.messages
        Writer(tmp_path / "a.jsonl", OPTIONS, {"torch": "2"})
    assert "other versions than {'torch': '2'}" in caplog.messages[0]


def test_an_output_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CannotWrite, match="cannot write"):
        opened(tmp_path / "file" / "a.jsonl")
    writer = opened(tmp_path / "a.jsonl")
    writer.output.mkdir()
    with pytest.raises(CannotWrite, match="cannot write"):
        writer.append(["{}"], 0, Counts())


def test_a_row_counts_its_answers_and_loops_by_family() -> None:
    counts = Counts()
    counts.add_row({"input_ids": [1] * 12, "answers": [[3, 5], [8, 12]], "loops": 1, "family": "a"})
    counts.add_row({"input_ids": [1, 2, 3], "answers": [], "family": "b"})
    counts.add("b", "alike")
    assert {name: counts.total(name) for name in KEPT} == {
        "rows": 2,
        "tokens": 15,
        "answers": 2,
        "answer_tokens": 6,
        "loops_cut": 1,
    }
    assert (counts.families["a"]["rows"], counts.families["b"]["alike"]) == (1, 1)
    assert counts.dropped() == f"1 {DROPPED['alike']}"
