"""Outputs of fit, data, cache, calibrate: what is refused before a model is loaded; locks."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from selfspec import files
from selfspec.cli import train
from selfspec.cli.main import BUG, main
from selfspec.model.backbone import Backbone
from tests.bad_input import snapshot
from tests.heads.kinds import make_heads

FIT = ["fit", "--data", "talks.jsonl", "--output"]
DATA = ["data", "--tokens", "9", "--output"]
CACHE = ["cache", "--data", "talks.jsonl", "--output"]


@pytest.fixture
def place(tmp_path: Path, backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Outputs of every kind that is not to be replaced; a model that must not be loaded."""

    def load(_asked: Any, **_options: Any) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(train, "_load", load)
    monkeypatch.chdir(tmp_path)
    backbone.model.save_pretrained(tmp_path / "model")
    make_heads("linear", backbone.unembedding).save(tmp_path / "heads")
    for name in (
        "notes/README.md",
        "shards/shard-00000.safetensors",
        "other/manifest.json",
        "file",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine\n")
    (tmp_path / "file").write_text("mine\n")
    (tmp_path / "mine.jsonl").write_text("mine\n")
    shutil.copy(tmp_path / "mine.jsonl", tmp_path / "talks.jsonl")
    (tmp_path / "link.jsonl").symlink_to("mine.jsonl")
    return tmp_path


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ([*FIT, "model", "--overwrite"], "which selfspec did not write"),
        ([*FIT, "heads"], "already. Give --overwrite"),
        ([*CACHE, "shards"], "which selfspec did not write"),
        ([*CACHE, "other"], "which selfspec did not write"),
        ([*DATA, "mine.jsonl"], "there is no mine.jsonl.run.json to continue it by"),
        ([*DATA, "link.jsonl"], "is a link"),
        ([*DATA, "d.txt"], "d.txt would hold lines of JSON. Name it d.jsonl"),
        ([*DATA, "notes"], "a folder or a device"),
        ([*DATA, "file/below.jsonl"], "Not a directory"),
    ],
    ids=lambda value: value[-1][:12] if isinstance(value, list) else "",
)
def test_an_output_is_refused_before_a_model_is_loaded_and_nothing_changes(
    place: Path, capsys: pytest.CaptureFixture[str], command: list[str], reason: str
) -> None:
    before = snapshot(place)
    assert main(command) == 2
    (line,) = [text for text in capsys.readouterr().err.splitlines() if "error" in text]
    assert reason in line
    assert snapshot(place) == before


@pytest.mark.parametrize("command", [[*FIT, "new"], [*CACHE, "new"], [*DATA, "new.jsonl"]])
def test_an_output_that_another_process_writes_is_refused(
    place: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    with files.locked(Path(command[-1]).absolute()):
        assert main(command) == 2
        assert "is being written by another process" in capsys.readouterr().err
    assert main(command) == BUG
    assert "the model was loaded" in capsys.readouterr().err
