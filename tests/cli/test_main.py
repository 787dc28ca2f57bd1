"""The program as a whole: help and log, flags and files of them, streams, Ctrl-C, users, bugs."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest
import typer

from selfspec import cli
from selfspec.api import speculator as facade
from selfspec.cli import base
from selfspec.cli.base import SHARED, merged
from selfspec.cli.main import BUG, INTERRUPTED, PIPE_CLOSED, app, main, ordered
from selfspec.config import SpeculationOptions
from selfspec.errors import ModelNotFound
from selfspec.model import backbone
from selfspec.options import ACCEPTANCE, CONTROLLERS, DRAFTERS, Costs, Easd, Exit, GammaTune
from tests.bad_input import furnish, snapshot
from tests.cli.fakes import Call, FakeSpeculator

ROOT = Path(__file__).parents[2]
SELFSPEC = [sys.executable, "-m", "selfspec"]
Capture = pytest.CaptureFixture[str]


def test_help_of_every_command_is_shown_in_groups(call: Call) -> None:
    for arguments in ([], ["heads"]):
        shown = call(arguments).out
        assert call([*arguments, "--help"]).out.rstrip() == shown.rstrip()
    for flag in ("-h", "--help-all"):
        shown = call(["generate", flag]).out
        headings = re.findall(r"^(\w+):$", shown, re.MULTILINE)
        assert headings == ["Arguments", "Options", "Model", "Drafts", "Answer"]
        assert "--drafter KIND[:KEY=VALUE,..]" in shown
    words = {word.partition("=")[0] for word in shown.split()}
    for kinds in (DRAFTERS, CONTROLLERS, ACCEPTANCE):
        for kind, made in kinds.items():
            assert {f"{kind}:{entry.name}" for entry in fields(made)} <= words
    assert {entry.name for entry in fields(Costs)} <= words
    assert "tau, in (0, 1]" in shown
    assert "exit:layers=N[/N..]" in shown
    for reason in ("paper calls for", "Printed nowhere", "document's example"):
        assert reason not in shown


@pytest.mark.parametrize(
    ("command", "lines"),
    [("generate", 40), ("chat", 40), ("verify", 40), ("tune", 40), ("trace", 50), ("bench", 50)],
)
def test_help_fits_a_screen_and_help_all_lists_everything(
    command: str, lines: int, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    usual = call([command, "--help"]).out
    assert len(usual.splitlines()) <= lines
    assert "--help-all" in usual
    shown = {word.strip(",") for word in call([command, "--help-all"]).out.split()}
    found: Any = typer.main.get_command(app())
    flags = {flag.opts[0] for flag in found.commands[command].params}
    assert flags - {"prompt"} <= shown


def test_executors_are_those_that_there_are() -> None:
    assert (backbone.AUTO, *backbone.EXECUTORS) == get_args(base.Executor)


def test_the_log_goes_to_stderr_and_quiet_and_verbose_may_stand_anywhere(capsys: Capture) -> None:
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
        base.say_next("fit", {})
        base.complain("wrong")
        said = capsys.readouterr().err.splitlines()
        asides = ["next: selfspec fit"] * ("notice" in heard) + ["selfspec: error: wrong"]
        assert said == [*(f"selfspec: {words}" for words in heard), *asides]
    words = ["lm-eval", "run", "--verbose", "-q"]  # which are its own, wherever ours stand
    assert ordered(words) == words
    assert ordered(["-v", *words]) == ["-v", *words]


# --- in a process


def shell(words: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run by a shell; `selfspec` in its words is the command. No cache folder of anybody."""
    words = words.replace("selfspec ", f"{sys.executable} -m selfspec ", 1)
    own = {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder / "cache"), **variables}
    return subprocess.run(
        ["/bin/sh", "-c", words],
        cwd=folder,
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_a_shell_completes_commands_and_hears_a_process_out(tmp_path: Path) -> None:
    asked = {"_SELFSPEC_COMPLETE": "complete_bash", "COMP_WORDS": "selfspec cha", "COMP_CWORD": "1"}
    last = 'main.main = lambda words: atexit.register(print, "last words") and 3; '
    for own, code, said in (("", 0, "chat"), (last, 3, "last words")):
        program = f"import atexit; from selfspec.cli import main; {own}main.run()"
        result = shell(f"PYTHONUNBUFFERED= {sys.executable} -c '{program}'", tmp_path, **asked)
        assert (result.returncode, result.stdout, result.stderr) == (code, f"{said}\n", "")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("selfspec --version >/dev/full", 2, "cannot write standard output or a file: No space"),
        ("selfspec --version >&-", 2, "cannot write standard output"),
        ("selfspec --version 2>&-", 0, ""),
        ("selfspec heads show nothing 2>/dev/full", 2, ""),
        ("echo a b | selfspec generate --model model --executor generic --drafter none", 0, ""),
        ("selfspec generate <&-", 2, "the prompt is empty"),
        ("selfspec generate --config /dev/stdin a </dev/zero", 2, "is a device"),
        ("cat /dev/zero | selfspec generate", 2, "has more than 4194304 bytes"),
    ],
)
def test_streams_that_are_closed_or_full(words: str, code: int, said: str, tmp_path: Path) -> None:
    furnish(tmp_path)
    result = shell(words, tmp_path)
    assert result.returncode == code, result.stderr
    assert said in result.stderr
    assert not re.search("Traceback|Exception", result.stderr)
    assert len(result.stderr.splitlines()) <= 1


@pytest.mark.parametrize("words", ["--help", "heads list"])
def test_nobody_reads_and_nothing_is_said(words: str) -> None:
    read, write = os.pipe()
    os.close(read)
    result = subprocess.run(
        [*SELFSPEC, *words.split()], stdout=write, stderr=subprocess.PIPE, cwd=ROOT, check=False
    )
    os.close(write)
    assert (result.returncode, result.stderr) == (PIPE_CLOSED, b"")


@pytest.mark.parametrize("delay_s", [0.15, 0.7, 3.0])
def test_ctrl_c_ends_it_with_130_whenever_it_comes(delay_s: float, tmp_path: Path) -> None:
    """While modules are imported, while a model is loaded, or while it waits for a prompt."""
    furnish(tmp_path)
    before = snapshot(tmp_path)
    minding = ["env", "--default-signal=INT"]  # what runs in the background ignores it from birth
    command = [*minding, *SELFSPEC, "chat", "--model", "model", "--dtype", "float32"]
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
        _, said = process.communicate(timeout=60)  # ends what it reads, so that it never waits on
        code = process.returncode
    assert code in (INTERRUPTED, -signal.SIGINT) or "init_import_site" in said
    if code == INTERRUPTED:  # else Python itself had not begun with ours
        assert ("selfspec: interrupted" in said, "Traceback" in said) == (True, False), said
    assert snapshot(tmp_path) == before


def test_ctrl_c_within_torch_ends_it_there(tmp_path: Path) -> None:
    """Torch's import runs Python from C++, which an exception aborts: its stand-in does so too."""
    (tmp_path / "torch.py").write_text(
        "import os, sys\nclass Lost:\n    def __del__(self): os.kill(os.getpid(), 2)\n"
        "Lost()\nsys.stderr.write('it went on')\n"  # what a finaliser raises is lost
        "try:\n    os.kill(os.getpid(), 2)\nexcept KeyboardInterrupt:\n    os.abort()\n"
    )
    done = shell("selfspec generate hi", tmp_path)
    assert (done.returncode, done.stderr) == (INTERRUPTED, "it went on\nselfspec: interrupted\n")


# --- bugs, and what is none


Raised = Callable[..., str]


@pytest.fixture
def raised(monkeypatch: pytest.MonkeyPatch, call: Call) -> Raised:
    """What a command that raises an error says of it, and its exit code."""

    def raise_(error: BaseException, code: int, *flags: str) -> str:
        def mistaken(**_: Any) -> None:
            raise error

        monkeypatch.setattr("selfspec.cli.main.app", lambda: mistaken)
        said = call(["generate", "a b", *flags], code)
        assert said.out == ""
        return str(said.err)

    return raise_


def test_a_bug_says_that_it_is_one_and_where_its_report_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: Raised
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (line,) = raised(KeyError("which\nnobody expected"), BUG).splitlines()
    (file,) = (tmp_path / "selfspec" / "bugs").iterdir()
    assert line.startswith("selfspec: error: this is a bug in selfspec: KeyError")
    assert f"A report is in {file}: please send it" in line
    text = file.read_text()
    assert re.match(r"selfspec [\d.]+: generate 'a b'\n", text)
    assert re.search(r"Traceback \(most recent call last\).*in mistaken", text, re.DOTALL)
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    (line,) = raised(KeyError("which"), BUG).splitlines()
    assert "No report could be written" in line


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (PermissionError(13, "Permission denied", "x"), "cannot use x: Permission denied"),
        (MemoryError(), "there is not enough memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "not enough memory"),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), "enough memory"),
        (ModelNotFound("no model here. Get one"), "selfspec: error: no model here. Get one"),
    ],
)
def test_a_refusal_is_no_bug_and_one_line(error: Exception, words: str, raised: Raised) -> None:
    (line,) = raised(error, 2).splitlines()
    assert words in line
    first, *_, last = raised(error, 2, "--debug").splitlines()
    assert (first, last) == ("Traceback (most recent call last):", line)


def test_what_ctrl_c_broke_is_no_bug_however_late_it_fails(
    monkeypatch: pytest.MonkeyPatch, raised: Raised, call: Call
) -> None:
    """A library may swallow the interrupt while it is imported, or miss a name much later."""
    late = ModuleNotFoundError("Could not import module 'PreTrainedModel'")
    monkeypatch.setattr(facade, "load", lambda **_: cli.interrupts.append(None))
    try:
        assert "selfspec: interrupted" in call(["generate", "a"], INTERRUPTED).err
        assert raised(late, INTERRUPTED) == "\nselfspec: interrupted\n"
    finally:
        cli.interrupts.clear()
    raised(late, BUG)


# --- flags and the YAML file: what they set, and which of them wins


def config(folder: Path, text: str) -> Path:
    (folder / "run.yaml").write_text(text, encoding="utf-8")
    return folder / "run.yaml"


def test_flags_have_no_defaults_and_reach_who_takes_them(speculator: FakeSpeculator) -> None:
    assert main(["generate", "hi"]) == 0
    assert (speculator.loaded, speculator.given) == ({}, {"raw": False})
    speculator.answers = [["one"]]
    arguments = ["--model", "m", "--dtype", "float32", "--no-speculate", "--pinned"]
    arguments += ["--drafter", "exit:layers=4/8", "--costs", "row=0.1", "--pinned-rows", "4"]
    arguments += ["--max-new-tokens", "9", "--stop", "a", "--stop-strings", "b", "--top-k", "5"]
    assert main(["generate", *arguments, "hi"]) == 0
    generation = {"max_new_tokens": 9, "stop_strings": ["a", "b"], "top_k": 5}
    assert speculator.given == generation | {"raw": False}
    assert speculator.loaded == generation | {
        "model": "m",
        "dtype": "float32",
        "speculate": False,
        "drafter": "exit:layers=4/8",
        "costs": "row=0.1",
        "pinned": True,
        "pinned_rows": 4,
    }


def test_of_an_option_each_setting_is_from_the_flag_or_else_the_file(tmp_path: Path) -> None:
    file = config(
        tmp_path,
        "drafter: {exit: {layers: [4, 8], threshold: 5e-1, max-tokens: 3}}\n"
        "controller: gammatune:rate=0.5\nacceptance: cm-asd\ncosts: row=0.1,head=0.2\n",
    )
    given = {
        "drafter": "ngram+exit:max_tokens=2",
        "controller": "gammatune:step=1",
        "acceptance": "easd:tokens=3",
        "costs": "row=0.3",
    }
    options = SpeculationOptions().updated(merged(file, given, SHARED))
    assert options.drafter == "ngram+exit"
    assert options.exit == Exit(layers=(4, 8), threshold=0.5, max_tokens=2)
    assert options.controller == GammaTune(rate=0.5, step=1.0)
    assert options.acceptance == Easd(tokens=3)
    assert options.costs == Costs(row=0.3, head=0.2)
    alone = merged(config(tmp_path, "drafter: {exit: {layers: 4}}"), {}, SHARED)
    assert SpeculationOptions().updated(alone).exit == Exit(layers=(4,))


def test_the_environment_stands_for_flags_between_these_and_a_file(
    speculator: FakeSpeculator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    file = config(
        tmp_path, "# ours\nmax-new-tokens: 7\nseed: 1\ntop_k: 2\npinned: true\nmin_p: 5e-1\n"
    )
    for name, value in (
        ("CONFIG", str(file)),
        ("SEED", "2"),
        ("TOP_K", "3"),
        ("SPECULATE", "false"),
        ("STOP_STRINGS", "a b\n c"),
    ):
        monkeypatch.setenv(f"SELFSPEC_{name}", value)
    assert main(["generate", "--top-k", "4", "--no-pinned", "hi"]) == 0
    generation: dict[str, Any] = {"max_new_tokens": 7, "seed": 2, "top_k": 4, "min_p": 0.5}
    generation["stop_strings"] = ["a b", " c"]
    assert speculator.given == generation | {"raw": False}
    others = {"speculate": False, "pinned": False, "config": str(file)}
    assert speculator.loaded == generation | others
    monkeypatch.setenv("SELFSPEC_SEED", "x")
    assert "(of SELFSPEC_SEED in the environment)" in call(["generate", "hi"], 2).err


def test_the_default_file_stands_below_all_others(
    speculator: FakeSpeculator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    file = tmp_path / "home" / "selfspec" / "config.yaml"
    file.parent.mkdir(parents=True)
    # of these, epochs is a key of other commands
    file.write_text(
        "seed: 1\ntop_k: 2\nmin_p: 0.5\nstop_strings: a,b\nepochs: 1\ndrafter: ngram:size=2\n"
    )
    given = config(tmp_path, "top_k: 3\nmin_p: 0.25\ndrafter: ngram:max_tokens=4\n")
    assert main(["generate", "--config", str(given), "--min-p", "0.1", "hi"]) == 0
    generation = {"seed": 1, "top_k": 3, "min_p": 0.1, "stop_strings": ["a,b"]}
    assert speculator.given == generation | {"raw": False}
    assert speculator.loaded is not None
    assert speculator.loaded["drafter"] == {"ngram": {"size": "2", "max_tokens": "4"}}
    # what a mode has no use for is left out there, not refused
    file.write_text("model: m\ntemperature: 0.5\nconcurrency: 8\nsystem: s\ndata: d\n")
    refused = call(["trace", "--from", "nowhere"], 2).err
    assert "means nothing" not in refused
    assert "the prompt is empty" in call(["generate", "--raw", ""], 2).err
    assert "no-method" in call(["bench", "--output", "x", "--methods", "no-method,plain"], 2).err
    fit = ["fit", "--cache", "nowhere", "--output", "x"]
    for preset in ([], ["--preset", "specbound"]):
        assert "with cache" not in call([*fit, *preset], 2).err
    assert f"{file}\n" in call(["env"]).out
    file.write_text("seeed: 1\n")
    assert f"unknown key in {file}: 'seeed'. Did you mean seed?" in call(["generate", "hi"], 2).err


@pytest.mark.parametrize(("seconds", "lines"), [(0.0, "1233"), (60.0, "13")])
def test_a_log_hears_of_long_work_now_and_then(
    seconds: float, lines: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "LOGGED_S", seconds)
    with base.bar("cache", "tokens") as show:
        for done in range(1, 4):
            show(done, 3)
    found = re.findall(r"(\d)/3 tokens", capsys.readouterr().err)
    assert "".join(found) == lines, "at once, as often as said, and at the end"
