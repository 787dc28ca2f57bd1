"""The whole program: help, log, flags and config files, streams, Ctrl-C, errors and bugs."""

from __future__ import annotations

import logging
import lzma
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

from selfspec import cli
from selfspec.api import speculator as facade
from selfspec.cli import base
from selfspec.cli.base import SHARED, merge_options
from selfspec.cli.main import BUG, INTERRUPTED, PIPE_CLOSED, app, main, reorder
from selfspec.config import SpeculationOptions
from selfspec.errors import ModelNotFound
from selfspec.model import backbone
from selfspec.options import ACCEPTANCE, CONTROLLERS, DRAFTERS, Costs, Easd, Exit, GammaTune
from tests.bad_input import snapshot
from tests.cli.fakes import Call, FakeSpeculator
from tests.talks import save_tiny

ROOT = Path(__file__).parents[2]
SELFSPEC = [sys.executable, "-m", "selfspec"]
Capture = pytest.CaptureFixture[str]


def test_help_of_every_command_is_shown_in_groups(call: Call) -> None:
    for arguments in ([], ["heads"]):
        text = call(arguments).out
        assert call([*arguments, "--help"]).out.rstrip() == text.rstrip()
    for flag in ("-h", "--help-all"):
        text = call(["generate", flag]).out
        headings = re.findall(r"^(\w+):$", text, re.MULTILINE)
        assert headings == ["Arguments", "Options", "Model", "Drafts", "Answer"]
        assert "--drafter KIND[:KEY=VALUE,..]" in text
    words = {word.partition("=")[0] for word in text.split()}
    for kinds in (DRAFTERS, CONTROLLERS, ACCEPTANCE):
        for kind, part in kinds.items():
            assert {f"{kind}:{entry.name}" for entry in fields(part)} <= words
    assert {entry.name for entry in fields(Costs)} <= words
    assert "tau, in (0, 1]" in text
    assert "exit:layers=N[/N..]" in text
    for reason in ("paper calls for", "Printed nowhere", "document's example"):
        assert reason not in text


@pytest.mark.parametrize(
    ("command", "lines"),
    [("generate", 40), ("chat", 40), ("verify", 40), ("tune", 40), ("trace", 50), ("bench", 50)],
)
def test_help_fits_a_screen_and_help_all_lists_everything(
    command: str, lines: int, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    short = call([command, "--help"]).out
    assert len(short.splitlines()) <= lines
    assert "--help-all" in short
    words = {word.strip(",") for word in call([command, "--help-all"]).out.split()}
    flags = {flag.opts[0] for flag in app().commands[command].params}
    assert flags - {"prompt"} <= words


def test_executor_choices_match_the_executors() -> None:
    assert (backbone.AUTO, *backbone.EXECUTORS) == get_args(base.Executor)


def test_the_log_goes_to_stderr_and_quiet_and_verbose_may_stand_anywhere(capsys: Capture) -> None:
    logger = logging.getLogger("selfspec.hub.models")
    for arguments, levels in (
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
        lines = capsys.readouterr().err.splitlines()
        asides = ["next: selfspec fit"] * ("notice" in levels) + ["selfspec: error: wrong"]
        assert lines == [*(f"selfspec: {level}" for level in levels), *asides]
    words = ["lm-eval", "run", "--verbose", "-q"]  # lm-eval's own flags, which stay in place
    assert reorder(words) == words
    assert reorder(["-v", *words]) == ["-v", *words]


# --- in a process


def shell(words: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `words` in a shell with an empty cache folder; a leading `selfspec` is the program."""
    words = words.replace("selfspec ", f"{sys.executable} -m selfspec ", 1)
    changes = {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder / "cache"), **variables}
    return subprocess.run(
        ["/bin/sh", "-c", words],
        cwd=folder,
        env={**os.environ, **changes},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_shell_completion_and_exit_handlers_work(tmp_path: Path) -> None:
    state = {"_SELFSPEC_COMPLETE": "complete_bash", "COMP_WORDS": "selfspec cha", "COMP_CWORD": "1"}
    last = 'main.main = lambda words: atexit.register(print, "last words") and 3; '
    for setup, code, output in (("", 0, "chat"), (last, 3, "last words")):
        program = f"import atexit; from selfspec.cli import main; {setup}main.run()"
        result = shell(f"PYTHONUNBUFFERED= {sys.executable} -c '{program}'", tmp_path, **state)
        assert (result.returncode, result.stdout, result.stderr) == (code, f"{output}\n", "")


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
def test_closed_or_full_streams(words: str, code: int, said: str, tmp_path: Path) -> None:
    save_tiny(tmp_path / "model")
    result = shell(words, tmp_path)
    assert result.returncode == code, result.stderr
    assert said in result.stderr
    assert not re.search("Traceback|Exception", result.stderr)
    assert len(result.stderr.splitlines()) <= 1


def test_a_python_without_docstrings_is_refused(tmp_path: Path) -> None:
    run = shell("selfspec heads list", tmp_path, PYTHONOPTIMIZE="2")
    assert run.returncode == 2
    assert "transformers cannot run under python -OO" in run.stderr


def test_a_terminal_of_no_columns_loses_no_line(tmp_path: Path) -> None:
    trace = lzma.decompress((ROOT / "docs/gallery/sum.jsonl.xz").read_bytes())
    (tmp_path / "sum.jsonl").write_bytes(trace)
    command = "selfspec trace --from sum.jsonl"
    usual, other = (shell(command, tmp_path, COLUMNS=width).stdout for width in ("80", "00"))
    assert "drafts kept" in usual
    assert other == usual


@pytest.mark.parametrize("words", ["--help", "heads list"])
def test_a_closed_pipe_ends_the_program_silently(words: str) -> None:
    read, write = os.pipe()
    os.close(read)
    result = subprocess.run(
        [*SELFSPEC, *words.split()], stdout=write, stderr=subprocess.PIPE, cwd=ROOT, check=False
    )
    os.close(write)
    assert (result.returncode, result.stderr) == (PIPE_CLOSED, b"")


@pytest.mark.parametrize("delay_s", [0.15, 0.7, 3.0])
def test_ctrl_c_at_any_time_exits_with_130(delay_s: float, tmp_path: Path) -> None:
    """Interrupt imports, the loading of a model, or the wait for a prompt."""
    save_tiny(tmp_path / "model")
    before = snapshot(tmp_path)
    prefix = ["env", "--default-signal=INT"]  # a background process starts with SIGINT ignored
    command = [*prefix, *SELFSPEC, "chat", "--model", "model", "--dtype", "float32"]
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
        _, errors = process.communicate(timeout=60)  # closes its stdin: it cannot wait for ever
        code = process.returncode
    assert code in (INTERRUPTED, -signal.SIGINT) or "init_import_site" in errors
    if code == INTERRUPTED:  # else Python had not yet reached our code
        assert ("selfspec: interrupted" in errors, "Traceback" in errors) == (True, False), errors
    assert snapshot(tmp_path) == before


def test_ctrl_c_during_the_import_of_torch_exits_at_once(tmp_path: Path) -> None:
    """Torch's import calls Python from C++, where an exception aborts; so does this stand-in."""
    (tmp_path / "torch.py").write_text(
        "import os, sys\nclass Lost:\n    def __del__(self): os.kill(os.getpid(), 2)\n"
        "Lost()\nsys.stderr.write('it went on')\n"  # a finaliser's exception is lost
        "try:\n    os.kill(os.getpid(), 2)\nexcept KeyboardInterrupt:\n    os.abort()\n"
    )
    run = shell("selfspec generate hi", tmp_path)
    assert (run.returncode, run.stderr) == (INTERRUPTED, "it went on\nselfspec: interrupted\n")


# --- bugs, refusals and interrupts


Raised = Callable[..., str]


@pytest.fixture
def raised(monkeypatch: pytest.MonkeyPatch, call: Call) -> Raised:
    """Run a command that raises an error, check its exit code and return its standard error."""

    def raise_(error: BaseException, code: int, *flags: str) -> str:
        def mistaken(**_: Any) -> None:
            raise error

        monkeypatch.setattr("selfspec.cli.main.app", lambda: mistaken)
        output = call(["generate", "a b", *flags], code)
        assert output.out == ""
        return str(output.err)

    return raise_


def test_a_bug_is_called_a_bug_and_its_report_is_named(
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


def test_a_late_failure_after_ctrl_c_is_no_bug(
    monkeypatch: pytest.MonkeyPatch, raised: Raised, call: Call
) -> None:
    """A library may swallow the interrupt during its import, and miss a name much later."""
    error = ModuleNotFoundError("Could not import module 'PreTrainedModel'")
    monkeypatch.setattr(facade, "load", lambda **_: cli.interrupts.append(None))
    try:
        assert "selfspec: interrupted" in call(["generate", "a"], INTERRUPTED).err
        assert raised(error, INTERRUPTED) == "\nselfspec: interrupted\n"
    finally:
        cli.interrupts.clear()
    raised(error, BUG)


# --- flags, environment and YAML files, and their precedence


def config(folder: Path, text: str) -> Path:
    (folder / "run.yaml").write_text(text, encoding="utf-8")
    return folder / "run.yaml"


def test_flags_have_no_defaults_and_reach_load_and_generate(speculator: FakeSpeculator) -> None:
    assert main(["generate", "hi"]) == 0
    assert (speculator.loaded, speculator.given) == ({}, {"raw": False})
    speculator.answers = [["one"]]
    arguments = ["--model", "m", "--dtype", "float32", "--no-speculate", "--pinned"]
    arguments += ["--drafter", "exit:layers=4/8", "--costs", "row=0.1", "--pinned-rows", "4"]
    arguments += ["--max-new-tokens", "9", "--stop", "a", "--stop-strings", "b", "--top-k", "5"]
    assert main(["generate", *arguments, "hi"]) == 0
    generation = {"max_new_tokens": 9, "stop_strings": ["a", "b"], "top_k": 5}
    assert speculator.given == generation | {"raw": False}
    loading = {"model": "m", "dtype": "float32", "speculate": False, "pinned": True}
    loading |= {"drafter": "exit:layers=4/8", "costs": "row=0.1", "pinned_rows": 4}
    assert speculator.loaded == generation | loading


def test_each_setting_of_an_option_comes_from_its_flag_or_the_file(tmp_path: Path) -> None:
    file = config(
        tmp_path,
        "drafter: {exit: {layers: [4, 8], threshold: 5e-1, max-tokens: 3}}\n"
        "controller: gammatune:rate=0.5\nacceptance: cm-asd\ncosts: row=0.1,head=0.2\n",
    )
    flags = {"drafter": "ngram+exit:max_tokens=2", "controller": "gammatune:step=1"}
    flags |= {"acceptance": "easd:tokens=3", "costs": "row=0.3"}
    options = SpeculationOptions().updated(merge_options(file, flags, SHARED))
    assert options.drafter == "ngram+exit"
    assert options.exit == Exit(layers=(4, 8), threshold=0.5, max_tokens=2)
    assert options.controller == GammaTune(rate=0.5, step=1.0)
    assert options.acceptance == Easd(tokens=3)
    assert options.costs == Costs(row=0.3, head=0.2)
    values = merge_options(config(tmp_path, "drafter: {exit: {layers: 4}}"), {}, SHARED)
    assert SpeculationOptions().updated(values).exit == Exit(layers=(4,))


def test_environment_variables_rank_between_flags_and_a_file(
    speculator: FakeSpeculator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    file = config(
        tmp_path, "# ours\nmax-new-tokens: 7\nseed: 1\ntop_k: 2\npinned: true\nmin_p: 5e-1\n"
    )
    variables = {"CONFIG": str(file), "SEED": "2", "TOP_K": "3", "SPECULATE": "false"}
    for name, value in {**variables, "STOP_STRINGS": "a b\n c"}.items():
        monkeypatch.setenv(f"SELFSPEC_{name}", value)
    assert main(["generate", "--top-k", "4", "--no-pinned", "hi"]) == 0
    generation: dict[str, Any] = {"max_new_tokens": 7, "seed": 2, "top_k": 4, "min_p": 0.5}
    generation["stop_strings"] = ["a b", " c"]
    assert speculator.given == generation | {"raw": False}
    others = {"speculate": False, "pinned": False, "config": str(file)}
    assert speculator.loaded == generation | others
    monkeypatch.setenv("SELFSPEC_SEED", "x")
    assert "(of SELFSPEC_SEED in the environment)" in call(["generate", "hi"], 2).err


def test_the_default_file_has_the_lowest_precedence(
    speculator: FakeSpeculator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    file = tmp_path / "home" / "selfspec" / "config.yaml"
    file.parent.mkdir(parents=True)
    # generate has no option epochs
    file.write_text(
        "seed: 1\ntop_k: 2\nmin_p: 0.5\nstop_strings: a,b\nepochs: 1\ndrafter: ngram:size=2\n"
    )
    path = config(tmp_path, "top_k: 3\nmin_p: 0.25\ndrafter: ngram:max_tokens=4\n")
    assert main(["generate", "--config", str(path), "--min-p", "0.1", "hi"]) == 0
    generation = {"seed": 1, "top_k": 3, "min_p": 0.1, "stop_strings": ["a,b"]}
    assert speculator.given == generation | {"raw": False}
    assert speculator.loaded is not None
    assert speculator.loaded["drafter"] == {"ngram": {"size": "2", "max_tokens": "4"}}
    # options that a mode does not take are ignored in this file, not refused
    file.write_text("model: m\ntemperature: 0.5\nconcurrency: 8\nsystem: s\ndata: d\n")
    error = call(["trace", "--from", "nowhere"], 2).err
    assert "means nothing" not in error
    assert "the prompt is empty" in call(["generate", "--raw", ""], 2).err
    assert "no-method" in call(["bench", "--output", "x", "--methods", "no-method,plain"], 2).err
    fit = ["fit", "--cache", "nowhere", "--output", "x"]
    for preset in ([], ["--preset", "specbound"]):
        assert "with cache" not in call([*fit, *preset], 2).err
    assert f"{file}\n" in call(["env"]).out
    file.write_text("seeed: 1\n")
    assert f"unknown key in {file}: 'seeed'. Did you mean seed?" in call(["generate", "hi"], 2).err


@pytest.mark.parametrize(("seconds", "lines"), [(0.0, "1233"), (60.0, "13")])
def test_long_work_is_logged_at_intervals(
    seconds: float, lines: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "LOGGED_S", seconds)
    with base.bar("cache", "tokens") as show:
        for done in range(1, 4):
            show(done, 3)
    counts = re.findall(r"(\d)/3 tokens", capsys.readouterr().err)
    assert "".join(counts) == lines, "at once, as often as said, and at the end"
