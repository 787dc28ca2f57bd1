"""`selfspec heads`, then the program as a whole: help, log, exit, pipes."""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from selfspec.api import speculator as facade
from selfspec.cli import common
from selfspec.cli.main import main
from selfspec.cli.settings import SHARED
from selfspec.config import EXECUTORS
from selfspec.errors import HeadsMismatch, InvalidHeads, ModelNotFound
from selfspec.hub import models as hub
from selfspec.model import choosing
from selfspec.options import Prices
from selfspec.options.controllers import CONTROLLERS
from selfspec.options.drafters import DRAFTERS
from selfspec.options.rules import ACCEPTANCE
from selfspec.training import records
from tests.cli.fakes import FakeSpeculator

ROOT = Path(__file__).parents[2]


# --- heads


@pytest.fixture
def heads_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout whose only heads are these; their weights are 1 MB of nothing."""
    folder = tmp_path / "checkpoints" / "toy"
    folder.mkdir(parents=True)
    values = {
        "format_version": 1,
        "base_model": "toy-model",
        "base_fingerprint": "f" * 64,
        "hidden_size": 8,
        "num_layers": 6,
        "vocab_size": 16,
        "exit_layers": [2, 4],
        "head_type": "translator",
        "defaults": {"drafter": "exit:threshold=0.7"},
        "training": {
            "data": "talks",
            "validation": "more talks",
            "dtype": "float32",
            "conversations": 3,
            "answer_tokens": 60,
            "epochs": 1,
            "steps": 2,
            "ce_share": 1.0,
            "learning_rate": 0.1,
            "seed": 0,
        },
    }
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    (folder / "model.safetensors").write_bytes(bytes(1_000_000))
    (folder / "run.yaml").write_text("run: {}\n", encoding="utf-8")
    shares = {"positions": 9, "agreement": 0.5, "agreement_top_25": 0.6, "agreement_top_10": 0.7}
    metrics = {"layers": {"2": shares | {"agreement_second": None}}, "coverage": 1.0}
    (folder / "metrics.json").write_text(json.dumps(metrics), encoding="utf-8")
    (folder / "README.md").write_text(records.card_of(folder), encoding="utf-8")
    monkeypatch.setattr(hub, "__file__", str(tmp_path / "selfspec" / "hub" / "models.py"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def test_heads_list_names_what_is_there(
    heads_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["heads", "list"]) == 0
    header, row = capsys.readouterr().out.splitlines()
    assert header.split() == ["name", "base", "model", "exit", "layers", "type", "MB"]
    assert row.split() == ["toy", "toy-model", "2,", "4", "translator", "1.0"]


def test_heads_list_goes_on_behind_a_damaged_folder(
    heads_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = heads_folder.parent / "bad"
    damaged.mkdir()
    (damaged / "config.json").write_text("{", encoding="utf-8")
    assert main(["heads", "list", "--json"]) == 0
    captured = capsys.readouterr()
    (row,) = json.loads(captured.out)
    assert row["name"] == "toy"
    assert row["size_bytes"] == sum(file.stat().st_size for file in heads_folder.iterdir())
    assert "bad/config.json" in captured.err


def test_heads_show_reads_the_config_only(
    heads_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (heads_folder / "model.safetensors").unlink()
    assert main(["heads", "show", "toy", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["exit_layers"] == [2, 4]
    assert main(["heads", "show", str(heads_folder)]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["exit_layers"] == "2, 4"
    assert lines["defaults"] == '{"drafter": "exit:threshold=0.7"}'


def test_heads_check_says_ok(
    heads_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded: list[Any] = []

    def load(model: str | None, heads: Path) -> FakeSpeculator:
        loaded.append((model, heads))
        return FakeSpeculator()

    monkeypatch.setattr(facade, "load", load)
    assert main(["heads", "check", "toy", "--model", "m"]) == 0
    assert loaded == [("m", heads_folder)]
    assert capsys.readouterr().out == "OK: toy fit fake\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [(HeadsMismatch("other"), 1), (InvalidHeads("cut off"), 1), (ModelNotFound("gone"), 2)],
)
def test_heads_check_fails_with_the_reason(
    error: Exception,
    code: int,
    heads_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def load(model: str | None, heads: Path) -> None:
        raise error

    monkeypatch.setattr(facade, "load", load)
    assert main(["heads", "check", "toy"]) == code
    captured = capsys.readouterr()
    assert captured.out == (f"failed: {error}\n" if code == 1 else "")
    assert captured.err == ("" if code == 1 else f"selfspec: error: {error}\n")


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("run.yaml", None, "no run.yaml"),
        ("metrics.json", "{}", "the records do not make a card: KeyError 'layers'"),
        ("README.md", "my own words", "README.md is not the card that the records make"),
    ],
)
def test_heads_check_names_what_is_not_as_it_should_be(
    name: str,
    text: str | None,
    problem: str,
    heads_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(facade, "load", lambda *_, **__: FakeSpeculator())
    if text is None:
        (heads_folder / name).unlink()
    else:
        (heads_folder / name).write_text(text, encoding="utf-8")
    assert main(["heads", "check", "toy"]) == 1
    assert capsys.readouterr().out == f"failed: {problem}\n"


def test_pulled_heads_are_found_by_name_and_replaced_when_pulled_again(
    heads_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = heads_folder.rename(tmp_path / "mine")
    (elsewhere / "notes.txt").write_text("not taken along")
    for version in (b"one", b"two"):
        (elsewhere / "model.safetensors").write_bytes(version)
        pull = ["heads", "pull", str(elsewhere)]
        assert main(pull) == (0 if version == b"one" else 2)
        assert main([*pull, "--overwrite"]) == 0
        found = hub.resolve_heads("mine")
        assert found == hub.pulled_heads() / "mine"
        assert (found / "model.safetensors").read_bytes() == version
    assert sorted(path.name for path in found.parent.iterdir()) == ["mine"]
    assert not (found / "notes.txt").exists()
    assert main(["heads", "pull", "mine"]) == 0
    assert "is there already" in capsys.readouterr().out


def test_heads_of_two_owners_are_kept_apart(
    heads_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And pulled anew each time, though their copies are known by then."""
    monkeypatch.setattr(hub, "_heads_from_hub", lambda name: tmp_path / "hub" / name)
    for version in ("one", "two"):
        for name in ("a/mine", "b/mine"):
            shutil.copytree(heads_folder, tmp_path / "hub" / name, dirs_exist_ok=True)
            (tmp_path / "hub" / name / "run.yaml").write_text(f"{name} {version}")
            assert main(["heads", "pull", name]) == 0
    for name in ("a/mine", "b/mine"):
        assert (hub.resolve_heads(name) / "run.yaml").read_text() == f"{name} two"
        assert hub.heads_name(hub.resolve_heads(name)) == name
    assert main(["heads", "show", "mine"]) == 2
    assert "'mine' may be a/mine or b/mine. Give the whole name" in capsys.readouterr().err
    shutil.rmtree(hub.resolve_heads("a/mine"))
    assert hub.resolve_heads("mine") == hub.resolve_heads("b/mine")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "README.md", "run.yaml"])
@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "device"])
def test_a_folder_with_a_link_or_device_is_not_pulled(
    name: str, kind: str, heads_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = heads_folder / name
    kept = path.rename(path.with_suffix(".kept"))
    make = {
        "link": lambda: path.symlink_to(kept),
        "pipe": lambda: os.mkfifo(path),
        "folder": path.mkdir,
        "device": lambda: path.symlink_to("/dev/zero"),
    }
    make[kind]()
    assert main(["heads", "pull", str(heads_folder)]) == 2
    assert not hub.pulled_heads().exists()


def test_what_is_no_heads_folder_is_not_pulled(
    heads_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (heads_folder / "config.json").write_text("{}", encoding="utf-8")
    assert main(["heads", "pull", str(heads_folder)]) == 2
    assert "format version None" in capsys.readouterr().err
    assert not hub.pulled_heads().exists()


# --- the whole program


def test_help_of_every_command_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["heads"]):
        assert main(arguments) == 0
        shown = capsys.readouterr().out
        assert main([*arguments, "--help"]) == 0
        assert capsys.readouterr().out.rstrip() == shown.rstrip()
    assert main(["generate", "--help"]) == 0
    assert "--drafter KIND[:KEY=VALUE,..]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "lines"),
    [("generate", 40), ("chat", 40), ("verify", 40), ("tune", 40), ("trace", 50), ("bench", 50)],
)
def test_help_fits_a_screen_and_help_all_lists_everything(
    command: str, lines: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([command, "--help"]) == 0
    usual = capsys.readouterr().out
    assert len(usual.splitlines()) <= lines
    assert "--help-all" in usual
    assert main([command, "--help-all"]) == 0
    shown = capsys.readouterr().out.split()
    flags = importlib.import_module(f"selfspec.cli.{command}").__dict__.get("FLAGS", SHARED)
    assert {flag.long_name for flag in flags} <= {word.strip(",") for word in shown}


def test_help_stands_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("-h", "--help-all"):
        assert main(["generate", flag]) == 0
        headings = re.findall(r"^(\w+):$", capsys.readouterr().out, re.MULTILINE)
        assert headings == ["Arguments", "Options", "Model", "Drafts", "Answer"]


def test_quiet_and_verbose_may_stand_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("selfspec.hub.models")
    for arguments, heard in (
        (["heads", "list"], ["notice", "error"]),
        (["-q", "heads", "list"], ["error"]),
        (["heads", "list", "--verbose"], ["how", "notice", "error"]),
    ):
        assert main(arguments) == 0
        logger.debug("how")
        logger.info("notice")
        logger.error("error")
        said = capsys.readouterr().err.splitlines()
        assert said == [f"selfspec: {words}" for words in heard]
    assert main(["-q", "heads", "list", "-v"]) == 2
    assert "--quiet and --verbose at once" in capsys.readouterr().err


def test_a_shell_completes_commands() -> None:
    asked = {"_SELFSPEC_COMPLETE": "complete_bash", "COMP_WORDS": "selfspec cha", "COMP_CWORD": "1"}
    result = run(capture_output=True, env={**os.environ, **asked})
    assert (result.returncode, result.stdout, result.stderr) == (0, "chat\n", "")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--dtype", "float31"], "dtype is 'float31', expected float32, bfloat16"),
        (["--executor", "quick"], "executor is 'quick', expected auto, fused"),
        (["--attn-implementation", "none"], "expected sdpa or eager"),
        (["--device", "0"], "device is '0', expected cpu"),
        (["--heads", "nowhere"], "'nowhere' is neither a folder nor a known name"),
        (["--model", "nowhere.gguf"], "'nowhere.gguf' is not there"),
        (["--draft-model", "./nowhere/"], "is not there"),
        (["--drafter", "ngram+draft-model"], "needs a second model"),
    ],
)
def test_what_could_not_be_loaded_is_refused_before_anything_is(
    arguments: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    loaded: list[Any] = []
    monkeypatch.setattr(facade, "load", lambda **options: loaded.append(options))
    assert main(["generate", "hi", *arguments]) == 2
    assert said in capsys.readouterr().err
    assert not loaded


def test_executors_are_those_that_there_are() -> None:
    assert (choosing.AUTO, *choosing.EXECUTORS) == EXECUTORS


def test_help_all_lists_all_settings_without_their_reasons(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["generate", "--help-all"]) == 0
    shown = capsys.readouterr().out
    words = {word.partition("=")[0] for word in shown.split()}
    for kinds in (DRAFTERS, CONTROLLERS, ACCEPTANCE):
        for kind, made in kinds.items():
            assert {f"{kind}:{entry.name}" for entry in fields(made)} <= words
    assert {entry.name for entry in fields(Prices)} <= words
    assert "tau, in (0, 1]" in shown
    for reason in ("paper calls for", "Printed nowhere", "document's example"):
        assert reason not in shown


def test_log_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    logging.getLogger("selfspec.hub.models").info("de-quantising")
    assert capsys.readouterr().err == "selfspec: de-quantising\n"


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    command = [sys.executable, "-c", "from selfspec.cli.main import run; run()", *arguments]
    return subprocess.run(command, text=True, cwd=ROOT, check=False, **options)


@pytest.mark.parametrize(("arguments", "lines"), [(["x"], 1), (["x", "--debug"], 9)])
def test_traceback_is_shown_with_debug_only(arguments: list[str], lines: int) -> None:
    result = run("heads", "show", *arguments, capture_output=True)
    assert result.returncode == 2
    assert result.stdout == ""
    assert min(result.stderr.count("\n"), 9) == lines


def test_closed_output_pipe_is_left_quietly() -> None:
    read, write = os.pipe()
    os.close(read)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    result = run(stdout=write, stderr=subprocess.PIPE, env=environment)
    os.close(write)
    assert result.stderr == ""
    assert result.returncode == common.PIPE_CLOSED
