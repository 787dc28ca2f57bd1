"""`selfspec heads`: list, show, check and pull; test_own_model has push."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from selfspec import files
from selfspec.api import speculator as facade
from selfspec.cli.main import main
from selfspec.errors import HeadsMismatch, InvalidHeads, ModelNotFound
from selfspec.heads.folder import registry_folder
from selfspec.hub import models as hub
from selfspec.training import records
from tests.cli.fakes import Call, FakeSpeculator
from tests.heads.kinds import make_config
from tests.talks import save_tiny

COUNTS = ("conversations", "answer_tokens", "epochs", "steps", "ce_share", "learning_rate", "seed")
TRAINING = {"data": "talks", "validation": "more", "dtype": "float32", **dict.fromkeys(COUNTS, 1)}
CONFIG: dict[str, Any] = {
    **{"base_model": "toy-model", "head_type": "translator", "training": TRAINING},
    "defaults": {"drafter": "exit:threshold=0.7"},
}
SHARES = {"positions": 9, "agreement": 0.5, "agreement_second": None}


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with one set of heads. Its weights are 1 MB of zeros."""
    folder = tmp_path / "checkpoints" / "toy"
    folder.mkdir(parents=True)
    make_config(**CONFIG).write(folder)
    (folder / "model.safetensors").write_bytes(bytes(1_000_000))
    (folder / "run.yaml").write_text("run: {}\n")
    (folder / "metrics.json").write_text(json.dumps({"layers": {"2": SHARES}, "coverage": 1.0}))
    (folder / "README.md").write_text(records.card_of(folder))
    monkeypatch.setattr(hub, "__file__", str(tmp_path / "selfspec" / "hub" / "models.py"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def test_heads_that_a_full_disk_forgets_are_not_called_nameless(toy: Path, call: Call) -> None:
    (toy.parents[1] / "cache").write_text("in the way")
    assert "cannot write" in (error := call(["heads", "use", str(toy)], 2).err)
    assert "which weights they are for" not in error


def test_list_names_all_heads_and_skips_a_damaged_folder(toy: Path, call: Call) -> None:
    header, line = call(["heads", "list"]).out.splitlines()
    assert header.split() == ["name", "base", "model", "exit", "layers", "type", "MB"]
    assert line.split() == ["toy", "toy-model", "2,", "4", "translator", "1.0"]
    (toy.parent / "bad").mkdir()
    (toy.parent / "bad" / "config.json").write_text("{")
    files.write(registry_folder() / "bad.json", '{"folders": ["~nobody-here", "zero\\u0000byte"]}')
    captured = call(["heads", "list", "--json"])
    (row,) = json.loads(captured.out)
    assert row["name"] == "toy"
    assert row["size_bytes"] == sum(file.stat().st_size for file in toy.iterdir())
    assert "bad/config.json" in captured.err
    save_tiny(toy.parents[1] / "untaught")
    (toy.parents[1] / "untaught" / "chat_template.jinja").unlink()
    error = call(["generate", "a", "--model", str(toy.parents[1] / "untaught")], 2).err
    assert "no chat template: is it a base model?" in error


def test_show_reads_the_config_only(toy: Path, call: Call) -> None:
    (toy / "model.safetensors").unlink()
    assert json.loads(call(["heads", "show", "toy", "--json"]).out)["exit_layers"] == [2, 4]
    shown = call(["heads", "show", str(toy)]).out.splitlines()
    lines = dict(line.split(maxsplit=1) for line in shown)
    assert lines["exit_layers"] == "2, 4"
    assert lines["defaults"] == '{"drafter": "exit:threshold=0.7"}'
    training = {**TRAINING, "before": {**TRAINING, "steps": 77}}
    make_config(**{**CONFIG, "training": training}).write(toy)
    output = call(["heads", "show", str(toy)]).out
    assert '"before": "an earlier fit, which --json shows"' in output
    assert "77" not in output


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (None, 0),
        (HeadsMismatch("other"), 1),
        (InvalidHeads("cut off"), 1),
        (ModelNotFound("gone"), 2),
    ],
)
def test_check_says_ok_or_fails_with_the_reason(
    error: Exception | None, code: int, toy: Path, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    monkeypatch.setattr(facade, "load", load := Mock(side_effect=[error or FakeSpeculator()]))
    monkeypatch.setattr("selfspec.cli.heads.folder_problems", lambda _: ["cut off"] * (code == 1))
    reasons = dict.fromkeys(["cut off", str(error)])  # each said once
    lines = ["OK: toy fit fake\n", "".join(f"failed: {reason}\n" for reason in reasons), ""][code]
    output = call(["heads", "check", "toy", "--model", "m"], code)
    assert tuple(output) == (lines, f"selfspec: error: {error}\n" * (code == 2))
    load.assert_called_once_with("m", heads=toy, costs="row=0")


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("run.yaml", None, "no run.yaml"),
        (
            "metrics.json",
            "{}",
            "metrics.json or calibration.json makes no card (UndefinedError 'dict object' has no",
        ),
        ("README.md", "my own words", "README.md is not the card that the records make"),
    ],
)
def test_check_names_the_wrong_file(
    name: str, text: str | None, why: str, toy: Path, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    monkeypatch.setattr(facade, "load", lambda *_, **__: FakeSpeculator())
    (toy / name).unlink()
    if text is not None:
        (toy / name).write_text(text)
    assert call(["heads", "check", "toy"], 1).out.startswith(f"failed: {why}")


def test_pulled_heads_are_found_and_replaced(toy: Path, tmp_path: Path, call: Call) -> None:
    source = toy.rename(tmp_path / "mine")
    (source / "notes.txt").write_text("not taken along")
    for version in (b"one", b"two"):
        (source / "model.safetensors").write_bytes(version)
        pull = ["heads", "pull", str(source)]
        error = call(pull, 0 if version == b"one" else 2).err
        assert ("there are heads called mine. Give --as NAME" in error) is (version == b"two")
        assert main([*pull, "--overwrite"]) == 0
        heads = hub.resolve_heads("mine")
        assert heads == hub.pulled_heads() / "mine"
        assert (heads / "model.safetensors").read_bytes() == version
    assert sorted(path.name for path in heads.parent.iterdir()) == ["mine"]
    assert not (heads / "notes.txt").exists()
    assert main(["heads", "pull", str(source), "--as", "theirs"]) == 0
    assert hub.resolve_heads("theirs") == hub.pulled_heads() / "theirs"
    for name, alias in ((str(source), "../up"), (str(source), "a/b"), ("a/mine", "b")):
        assert "name" in call(["heads", "pull", name, "--as", alias], 2).err
    assert "is there already" in call(["heads", "pull", "mine"]).out


def test_heads_of_two_owners_are_kept_apart_and_every_pull_updates(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    monkeypatch.setattr(hub, "fetch_heads", lambda name: tmp_path / "hub" / name)
    for version in ("one", "two"):
        for name in ("a/mine", "b/mine"):
            shutil.copytree(toy, tmp_path / "hub" / name, dirs_exist_ok=True)
            (tmp_path / "hub" / name / "run.yaml").write_text(f"{name} {version}")
            assert main(["heads", "pull", name]) == 0
    for name in ("a/mine", "b/mine"):
        assert (hub.resolve_heads(name) / "run.yaml").read_text() == f"{name} two"
        assert hub.heads_name(hub.resolve_heads(name)) == name
    assert "'mine' may be a/mine or b/mine. Give" in call(["heads", "show", "mine"], 2).err
    shutil.rmtree(hub.resolve_heads("a/mine"))
    assert hub.resolve_heads("mine") == hub.resolve_heads("b/mine")


PLACED: dict[str, Any] = {
    "a link": lambda path: path.symlink_to(path.with_suffix(".kept")),
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "no heads": lambda path: path.write_text("{}"),
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("config.json", kind) for kind in PLACED),
        ("model.safetensors", "a link"),
        ("run.yaml", "a pipe"),
    ],
)
def test_only_plain_files_are_pulled(name: str, kind: str, toy: Path, call: Call) -> None:
    (toy / name).rename((toy / name).with_suffix(".kept"))
    PLACED[kind](toy / name)
    error = call(["heads", "pull", str(toy)], 2).err
    assert ("format version None" in error) is (kind == "no heads")
    assert not hub.pulled_heads().exists()
