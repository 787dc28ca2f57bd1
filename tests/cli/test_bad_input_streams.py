"""The program as a whole: closed and full streams, Ctrl-C, other users, bugs; each in a process."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import selfspec.cli.main
from selfspec.cli import app, common
from selfspec.cli.main import BUG, main
from tests.bad_input import furnish, snapshot

ROOT = Path(__file__).parents[2]
SELFSPEC = [sys.executable, "-m", "selfspec"]


def shell(words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run by a shell; `selfspec` in its words is the command. No cache folder of anybody."""
    words = words.replace("selfspec ", f"{sys.executable} -m selfspec ", 1)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder / "cache")}
    return subprocess.run(
        ["/bin/sh", "-c", words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (
            "selfspec --version >/dev/full",
            2,
            "cannot write standard output: No space left",
        ),
        ("selfspec heads --help >/dev/full", 2, "No space left"),
        ("selfspec --version >&-", 2, "cannot write standard output"),
        ("selfspec --version 2>&-", 0, ""),
        ("selfspec --version 2>/dev/full", 0, ""),
        ("selfspec heads show nothing 2>&-", 2, ""),
        ("selfspec heads show nothing 2>/dev/full", 2, ""),
        ("selfspec generate <&-", 2, "the prompt is empty"),
        ("selfspec generate --file /dev/stdin </dev/null", 2, "is a device"),
        ("printf '' | selfspec generate --file /dev/stdin", 2, "the prompt is empty"),
        ("selfspec generate --config /dev/stdin a </dev/zero", 2, "is a device"),
        ("cat /dev/zero | selfspec generate a --config /dev/stdin", 2, "has more than 1048576"),
        ("cat /dev/zero | selfspec generate", 2, "has more than 4194304 bytes"),
    ],
)
def test_streams_that_are_not_as_they_should_be(
    words: str, code: int, said: str, tmp_path: Path
) -> None:
    result = shell(words, tmp_path)
    assert result.returncode == code, result.stderr
    assert said in result.stderr
    assert "Traceback" not in result.stderr
    assert "Exception" not in result.stderr
    assert len(result.stderr.splitlines()) <= 1


def test_nobody_reads_and_nothing_is_said(tmp_path: Path) -> None:
    for words in ("heads --help", "--help", "heads list"):
        with subprocess.Popen(
            [*SELFSPEC, *words.split()], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdout.close()
            said = process.stderr.read()
        assert process.returncode == common.PIPE_CLOSED
        assert said == b""


@pytest.mark.parametrize("delay_s", [0.15, 0.5, 1.5, 3.0])
def test_ctrl_c_ends_it_with_130_whenever_it_comes(delay_s: float, tmp_path: Path) -> None:
    """While modules are imported, while a model is loaded, or while it waits for a prompt."""
    furnish(tmp_path)
    before = snapshot(tmp_path)
    command = [*SELFSPEC, "chat", "--model", "model", "--dtype", "float32"]
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(delay_s)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        said = process.stderr.read()
        assert process.wait(30) in (common.INTERRUPTED, -signal.SIGINT)
    if process.returncode == common.INTERRUPTED:  # else Python itself had not begun with ours
        assert "selfspec: interrupted" in said
        assert "Traceback" not in said
    assert snapshot(tmp_path) == before


@pytest.mark.skipif(
    os.name != "posix" or os.geteuid() != 0 or shutil.which("setpriv") is None,
    reason="needs root, to be somebody else",
)
@pytest.mark.parametrize(
    "arguments",
    [
        "generate a --config closed.yaml",
        "generate --file closed.yaml",
        "generate a --model closed",
        "generate a --model closed.gguf",
        "trace --from closed.yaml",
        "heads show closed",
        "report closed --output new",
        "bench --suite closed.jsonl --output new",
        "bench --suite prompts.jsonl --output new",
    ],
)
def test_what_may_not_be_read_or_written_is_named(arguments: str, tmp_path: Path) -> None:
    """As another user, who may read the folder but neither write it nor read what is closed."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    for name in ("closed.yaml", "closed.gguf", "closed.jsonl"):
        (tmp_path / name).write_text("a")
        (tmp_path / name).chmod(0)
    (tmp_path / "closed").mkdir(mode=0)
    for folder in (tmp_path, *list(tmp_path.parents)[:-2]):
        folder.chmod(0o755)
    before = snapshot(tmp_path)
    other = "setpriv --reuid=65534 --regid=65534 --clear-groups"
    result = shell(f"exec {other} {sys.executable} -m selfspec {arguments}", tmp_path)
    if "No module named" in result.stderr or "can't open" in result.stderr:
        pytest.skip("another user cannot read this checkout")
    assert result.returncode == 2, result.stderr
    assert "selfspec: error: " in result.stderr
    assert "Traceback" not in result.stderr
    assert "bug of selfspec" not in result.stderr
    assert snapshot(tmp_path) == before


# --- bugs


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command with a mistake in it."""

    def mistaken(**_: Any) -> None:
        raise KeyError("which\nnobody expected")

    monkeypatch.setattr(app, "app", mistaken)


def test_an_import_that_ctrl_c_broke_is_no_bug_however_late_it_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A library swallows the interrupt while it imports, and misses a name much later."""

    def slow(**_: Any) -> None:
        raise ModuleNotFoundError("Could not import module 'PreTrainedModel'")

    monkeypatch.setattr(app, "app", slow)
    monkeypatch.setattr(selfspec.cli.main, "_interrupts", [0.0])
    assert main(["generate", "a b"]) == common.INTERRUPTED
    assert "selfspec: interrupted" in capsys.readouterr().err
    monkeypatch.setattr(selfspec.cli.main, "_interrupts", [])
    assert main(["generate", "a b"]) == BUG


def test_a_bug_says_that_it_is_one_and_where_its_report_is(
    broken: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["generate", "a b"]) == BUG
    (line,) = capsys.readouterr().err.splitlines()
    (file,) = (tmp_path / "selfspec" / "bugs").iterdir()
    assert line.startswith("selfspec: error: this is a bug of selfspec: KeyError")
    assert f"A report is in {file}: please send it. To see it here, add --debug" in line
    text = file.read_text()
    assert text.startswith("selfspec bug report")
    assert "selfspec generate 'a b'" in text
    assert "torch 2" in text
    assert "Traceback (most recent call last)" in text
    assert "in mistaken" in text


def test_a_bug_whose_report_cannot_be_written_is_said_all_the_same(
    broken: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert main(["generate"]) == BUG
    (line,) = capsys.readouterr().err.splitlines()
    assert "No report could be written" in line


def test_what_the_system_refuses_is_no_bug(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    for error, words in (
        (PermissionError(13, "Permission denied", "there"), "cannot use there: Permission denied"),
        (MemoryError(), "there is not enough memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "not enough memory"),
    ):

        def refuse(error: Exception = error, **_: Any) -> None:
            raise error

        monkeypatch.setattr(app, "app", refuse)
        assert main(["generate"]) == 2
        assert words in capsys.readouterr().err


def test_an_import_that_ctrl_c_broke_is_an_interrupt(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def stopped(**_: Any) -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            raise ImportError("numpy failed") from error

    monkeypatch.setattr(app, "app", stopped)
    assert main(["generate"]) == common.INTERRUPTED
    assert capsys.readouterr().err == "\nselfspec: interrupted\n"
