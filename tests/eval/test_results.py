"""The folder of a run: what is kept, what is replaced, when going on is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from selfspec.errors import CannotWrite, InvalidOption
from selfspec.eval import results
from selfspec.eval.answers import Answer, Run
from selfspec.eval.summary import summarise

RECORD: dict[str, Any] = {"run": {"limit": 2, "methods": ["plain"]}, "machine": {"threads": 1}}


@pytest.fixture
def summary() -> dict[str, Any]:
    run = Run(seconds=2.0, arrivals=[(1, 1.0), (1, 1.0)], equal=True)
    answer = Answer(id="ü", task="QA", turn=1, repeat=1, new_tokens=2, runs={"plain": run})
    method = {"method": "plain", "source": "", "setting": {}, "chosen_from": []}
    return summarise([answer], {"plain": method})


def test_a_finished_run_comes_back_as_it_was_written(
    summary: dict[str, Any], tmp_path: Path
) -> None:
    results.begin(tmp_path / "new" / "run", RECORD, resume=False)
    text = results.write(tmp_path / "new" / "run", summary)
    assert results.read(tmp_path / "new" / "run") == results.Results("run", RECORD, summary)
    files = {path.name: path for path in (tmp_path / "new" / "run").iterdir()}
    assert files.keys() == {"run.yaml", "summary.json", "table.csv", "table.md"}
    assert files["table.md"].read_text(encoding="utf-8") == text


def test_starting_over_removes_what_a_bench_writes_and_nothing_else(tmp_path: Path) -> None:
    for name in (*results.FILES, "notes.txt"):
        (tmp_path / name).write_text("old")
    results.begin(tmp_path, RECORD, resume=False)
    (tmp_path / results.SUMMARY).write_text("old")
    results.check_free(tmp_path, overwrite=True, resume=False)
    results.begin(tmp_path, RECORD, resume=False)
    assert {path.name for path in tmp_path.iterdir()} == {"run.yaml", "notes.txt"}


def test_a_folder_with_other_files_is_free(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    results.check_free(tmp_path, overwrite=False, resume=False)
    results.check_free(tmp_path / "none", overwrite=False, resume=False)


@pytest.mark.parametrize("name", results.FILES)
def test_one_file_of_a_bench_is_enough_to_ask(name: str, tmp_path: Path) -> None:
    results.begin(tmp_path, RECORD, resume=False)
    (tmp_path / name).touch()
    with pytest.raises(InvalidOption, match="holds results"):
        results.check_free(tmp_path, overwrite=False, resume=False)


@pytest.mark.parametrize("name", results.FILES)
def test_a_file_of_somebody_else_stays_whatever_was_said(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("mine")
    for overwrite in (True, False):
        with pytest.raises(CannotWrite, match=f"holds {name}, which selfspec did not write"):
            results.check_free(tmp_path, overwrite=overwrite, resume=not overwrite)


def test_going_on_keeps_what_is_there(tmp_path: Path) -> None:
    results.begin(tmp_path, RECORD, resume=True)  # nothing was there: as good as a start
    (tmp_path / "answers.jsonl").write_text("{}\n")
    before = (tmp_path / "run.yaml").read_bytes()
    results.begin(tmp_path, RECORD, resume=True)
    assert (tmp_path / "answers.jsonl").read_text() == "{}\n"
    assert (tmp_path / "run.yaml").read_bytes() == before


def test_going_on_elsewhere_or_otherwise_is_refused_by_name(tmp_path: Path) -> None:
    results.begin(tmp_path, RECORD, resume=False)
    with pytest.raises(InvalidOption, match="machine threads was 1, now it is 2"):
        results.begin(tmp_path, {**RECORD, "machine": {"threads": 2}}, resume=True)
    with pytest.raises(InvalidOption, match=r"run methods was \['plain'\], now it is \['other'\]"):
        results.begin(tmp_path, {"run": {"limit": 2, "methods": ["other"]}}, resume=True)
