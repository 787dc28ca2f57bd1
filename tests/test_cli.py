from __future__ import annotations

import inspect
import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import pytest

from selfspec import generate as facade
from selfspec import hub
from selfspec.cli import chat, common, env, flags
from selfspec.cli.main import main
from selfspec.config import SpeculationOptions
from selfspec.errors import HeadsMismatch, InvalidHeads, InvalidOption, InvalidPrompt, ModelNotFound

ROOT = Path(__file__).parents[1]


@dataclass
class FakeStats:
    def line(self) -> str:
        return "2 tokens, CR 2.00"

    def to_dict(self) -> dict[str, Any]:
        return {"new_tokens": 2}


@dataclass
class FakeAnswer:
    text: str = "Hello you."
    token_ids: list[int] = field(default_factory=lambda: [5, 6])
    stats: FakeStats = field(default_factory=FakeStats)
    stop_reason: str = "eos"


@dataclass
class FakeStream:
    """Gives its pieces one by one; an exception among them is raised there."""

    pieces: list[Any]
    said: str = ""
    closed: bool = False

    def __iter__(self) -> Iterator[str]:
        for piece in self.pieces:
            if isinstance(piece, BaseException):
                raise piece
            self.said += piece
            yield piece

    def close(self) -> None:
        self.closed = True

    @property
    def result(self) -> FakeAnswer:
        return FakeAnswer(text=self.said)


@dataclass
class FakeSpeculator:
    """Records prompts and options; answers each with the next of `answers`."""

    answers: list[list[Any]] = field(default_factory=lambda: [["Hello ", "you."]])
    label: str = "fake"
    heads: object | None = "heads"
    options: SpeculationOptions = field(default_factory=SpeculationOptions)
    prompts: list[Any] = field(default_factory=list)
    given: dict[str, Any] = field(default_factory=dict)
    streams: list[FakeStream] = field(default_factory=list)
    loaded: flags.Settings | None = None

    def stream(self, prompt: Any, **options: Any) -> FakeStream:
        self.prompts.append(prompt)
        self.given = options
        answer = self.answers.pop(0)
        if isinstance(answer[0], InvalidPrompt):
            raise answer[0]
        self.streams.append(FakeStream(answer))
        return self.streams[-1]

    def generate(self, prompt: Any, **options: Any) -> FakeAnswer:
        list(stream := self.stream(prompt, **options))
        return stream.result

    def session(self) -> FakeSpeculator:
        return self


@pytest.fixture(autouse=True)
def quiet_afterwards() -> Iterator[None]:
    """Takes back the handler that a command adds: it writes to this test's standard error."""
    logger = logging.getLogger("selfspec")
    handlers, level = list(logger.handlers), logger.level
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)


@pytest.fixture
def speculator(monkeypatch: pytest.MonkeyPatch) -> FakeSpeculator:
    """What every command loads; `loaded` holds the settings that it was asked with."""
    fake = FakeSpeculator()

    def load(settings: flags.Settings) -> FakeSpeculator:
        fake.loaded = settings
        return fake

    monkeypatch.setattr(common, "load", load)
    return fake


@pytest.fixture
def piped(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    """Puts bytes on standard input."""

    def pipe(data: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))

    return pipe


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def errors(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Lines on standard error; standard output must be empty."""
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()


# --- generate


def test_answer_goes_to_stdout_and_statistics_to_stderr(
    speculator: FakeSpeculator, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--stats", "hi"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "Hello you.\n"
    assert captured.err == "2 tokens, CR 2.00\n"
    assert speculator.prompts == [[user("hi")]]


def test_statistics_are_shown_on_request_only(
    speculator: FakeSpeculator, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "hi"]) == 0
    assert capsys.readouterr().err == ""


def test_newline_is_added_only_where_the_answer_has_none(
    speculator: FakeSpeculator, capsys: pytest.CaptureFixture[str]
) -> None:
    speculator.answers = [["done\n"], []]
    assert main(["generate", "hi"]) == 0
    assert capsys.readouterr().out == "done\n"


def test_json_is_one_object_and_nothing_else(
    speculator: FakeSpeculator, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--json", "--seed", "7", "hi"]) == 0
    captured = capsys.readouterr()
    record = json.loads(captured.out)
    assert captured.err == ""
    assert record["text"] == "Hello you."
    assert record["token_ids"] == [5, 6]
    assert record["stop_reason"] == "eos"
    assert record["stats"] == {"new_tokens": 2}
    assert (record["model"], record["heads"]) == ("fake", hub.DEFAULT_HEADS)
    assert record["options"]["seed"] == 7
    assert record["options"]["max_draft_tokens"] == SpeculationOptions().max_draft_tokens


@pytest.mark.parametrize(
    ("heads", "arguments", "shown"),
    [("fitted", ["--heads", "logit-lens"], "logit-lens"), (None, [], None)],
)
def test_json_names_the_heads(
    speculator: FakeSpeculator,
    capsys: pytest.CaptureFixture[str],
    heads: str | None,
    arguments: list[str],
    shown: str | None,
) -> None:
    speculator.heads = heads
    assert main(["generate", "--json", *arguments, "hi"]) == 0
    assert json.loads(capsys.readouterr().out)["heads"] == shown


def test_prompt_comes_from_standard_input_without_its_last_newline(
    speculator: FakeSpeculator, piped: Callable[[bytes], None]
) -> None:
    piped("grüß\nmich\n".encode())
    assert main(["generate"]) == 0
    assert speculator.prompts == [[user("grüß\nmich")]]


def test_prompt_comes_from_a_file(speculator: FakeSpeculator, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("from a file\n", encoding="utf-8")
    assert main(["generate", "--file", str(file)]) == 0
    assert speculator.prompts == [[user("from a file")]]


def test_raw_prompt_stays_as_it_is(
    speculator: FakeSpeculator, piped: Callable[[bytes], None]
) -> None:
    piped(b"def f():\n")
    assert main(["generate", "--raw"]) == 0
    assert speculator.prompts == ["def f():\n"]
    assert speculator.given["raw"] is True


def test_system_message_comes_first(speculator: FakeSpeculator) -> None:
    assert main(["generate", "--system", "Be brief.", "hi"]) == 0
    assert speculator.prompts == [[{"role": "system", "content": "Be brief."}, user("hi")]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", " "], "the prompt is empty"),
        (["generate", "--file", "not-there.txt"], "cannot read the prompt"),
        (["generate", "hi", "--file", "x"], "a prompt and --file at once"),
        (["generate", "\udcff"], "the prompt is not UTF-8"),
        (["generate", "--raw", "--system", "s", "hi"], "--raw and --system at once"),
        (["generate", "--max-new-tokens", "0", "hi"], "max_new_tokens is 0, expected at least 1"),
        (["generate", "--max-new-tokens", "x", "hi"], "Invalid value for '--max-new-tokens'"),
        (["generate", "--exit-threshold", "0.9,x", "hi"], "exit_threshold is '0.9,x', expected a"),
        (["generate", "--exit-layers", "1.5", "hi"], "exit_layers is '1.5', expected a list"),
        (["generate", "--hedas", "x", "hi"], "--heads"),
        (["generate", "--config", "not-there.yaml", "hi"], "cannot read the config"),
        (["generte", "hi"], "Did you mean 'generate'?"),
        (["heads", "show", "nowhere"], "'nowhere' is neither a folder nor a known name"),
        (["heads", "show"], "Missing argument 'DIR'"),
    ],
)
def test_bad_input_is_one_clear_line_and_exit_code_2(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(common, "load", lambda settings: pytest.fail("loaded a model"))
    assert main(arguments) == 2
    (line,) = errors(capsys)
    assert line.startswith("selfspec: error: ")
    assert message in line


@pytest.mark.parametrize(("data", "message"), [(b"\n", "is empty"), (b"\xff", "byte 0 is wrong")])
def test_bad_standard_input_is_refused(
    data: bytes,
    message: str,
    piped: Callable[[bytes], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    piped(data)
    assert main(["generate"]) == 2
    assert message in errors(capsys)[0]


def test_missing_prompt_on_a_terminal_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", type("Terminal", (), {"isatty": lambda self: True})())
    assert main(["generate"]) == 2
    assert "no prompt" in errors(capsys)[0]


def test_error_of_the_package_is_one_line_unless_debug_is_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(settings: flags.Settings) -> None:
        raise ModelNotFound("no model here. Get one")

    monkeypatch.setattr(common, "load", fail)
    assert main(["generate", "hi"]) == 2
    assert errors(capsys) == ["selfspec: error: no model here. Get one"]
    with pytest.raises(ModelNotFound):
        main(["generate", "hi"], debug=True)


def test_interrupt_exits_with_130_and_a_short_line(
    speculator: FakeSpeculator, capsys: pytest.CaptureFixture[str]
) -> None:
    speculator.answers = [["Hel", KeyboardInterrupt()]]
    assert main(["generate", "hi"]) == 130
    captured = capsys.readouterr()
    assert captured.out == "Hel"
    assert captured.err.split() == ["selfspec:", "interrupted"]


# --- flags and the YAML file


def test_every_speculation_option_has_a_flag_with_help() -> None:
    known = {flag.name: flag for flag in flags.SPECULATION}
    assert known.keys() == {entry.name for entry in fields(SpeculationOptions)}
    assert all(flag.help for flag in known.values())


def test_flags_have_no_defaults_of_their_own(speculator: FakeSpeculator) -> None:
    assert main(["generate", "hi"]) == 0
    assert speculator.loaded == flags.Settings(generation={"raw": False})


def test_help_states_the_defaults_of_the_facade() -> None:
    defaults = inspect.signature(facade.load).parameters
    texts = {flag.name: flag.help for flag in flags.LOADING}
    for name in ("dtype", "attn_implementation"):
        assert f"{defaults[name].default} (the default)" in texts[name]


def test_flags_reach_the_function_that_takes_them(speculator: FakeSpeculator) -> None:
    arguments = ["--model", "m", "--dtype", "float32", "--no-speculate", "--pinned"]
    arguments += ["--exit-layers", "4,8", "--exit-threshold", "0.5,0.75", "--max-draft-tokens", "3"]
    arguments += ["--max-new-tokens", "9", "--stop", "a", "--stop-strings", "b", "--top-k", "5"]
    assert main(["generate", *arguments, "hi"]) == 0
    assert speculator.loaded == flags.Settings(
        loading={"model": "m", "dtype": "float32"},
        speculation={
            "speculate": False,
            "exit_layers": (4, 8),
            "exit_threshold": (0.5, 0.75),
            "max_draft_tokens": 3,
            "pinned": True,
        },
        generation={
            "max_new_tokens": 9,
            "stop_strings": ["a", "b"],
            "top_k": 5,
            "do_sample": True,
            "raw": False,
        },
    )


@pytest.fixture
def config(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a YAML file."""

    def write(text: str) -> Path:
        file = tmp_path / "run.yaml"
        file.write_text(text, encoding="utf-8")
        return file

    return write


def test_flag_wins_over_yaml(config: Callable[[str], Path]) -> None:
    file = config("max-draft-tokens: 2\nexit_threshold: 0.5\npinned: true\nmodel: m\n")
    found = flags.settings(file, {"max_draft_tokens": 4, "pinned": False, "seed": None})
    assert found.speculation == {"max_draft_tokens": 4, "exit_threshold": 0.5, "pinned": False}
    assert found.loading == {"model": "m"}


def test_yaml_lists_scalars_and_exponents_are_read_as_the_option_wants(
    config: Callable[[str], Path],
) -> None:
    file = config("exit_layers: [4, 8]\nexit_threshold: 5e-1\nstop_strings: a,b\n")
    found = flags.settings(file, {})
    assert found.speculation == {"exit_layers": (4, 8), "exit_threshold": 0.5}
    assert found.generation == {"stop_strings": ["a,b"]}
    assert flags.settings(config("exit_layers: 4"), {}).speculation == {"exit_layers": (4,)}


def test_empty_yaml_file_changes_nothing(config: Callable[[str], Path]) -> None:
    assert flags.settings(config("# nothing\n"), {}) == flags.Settings()


@pytest.mark.parametrize(
    ("given", "do_sample"),
    [({"temperature": 0.5}, True), ({"temperature": 0.5, "do_sample": False}, False)],
)
def test_sampling_flag_implies_drawing_unless_it_is_refused(
    given: dict[str, Any], do_sample: bool
) -> None:
    assert flags.settings(None, given).generation["do_sample"] is do_sample


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_draft_token: 3", "Did you mean max_draft_tokens?"),
        ("pinned: 1", "pinned is 1, expected true or false"),
        ("max_draft_tokens: 2.5", "max_draft_tokens is 2.5, expected a whole number"),
        ("max_draft_tokens: true", "max_draft_tokens is True, expected a whole number"),
        ("exit_layers: []", r"exit_layers is \[\], expected a list"),
        ("max_new_tokens: -1", "max_new_tokens is -1, expected at least 1"),
        ("model: 3", "model is 3, expected text"),
        ("- a", "holds a list, expected `option: value` lines"),
        ("a: [", "is not YAML"),
    ],
)
def test_bad_yaml_is_refused_on_one_line(
    text: str, message: str, config: Callable[[str], Path]
) -> None:
    with pytest.raises(InvalidOption, match=message) as caught:
        flags.settings(config(text), {})
    assert "\n" not in str(caught.value)


# --- chat


def test_chat_remembers_turns_until_they_are_cleared(
    speculator: FakeSpeculator,
    piped: Callable[[bytes], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    speculator.answers = [["one"], ["two"], ["three"]]
    piped(b"a\n\nb\n/clear\nc\n/exit\nnever\n")
    assert main(["chat", "--system", "s", "--stats", "--seed", "1"]) == 0
    first = [{"role": "system", "content": "s"}, user("a")]
    assert speculator.prompts == [
        first,
        [*first, {"role": "assistant", "content": "one"}, user("b")],
        [{"role": "system", "content": "s"}, user("c")],
    ]
    captured = capsys.readouterr()
    assert captured.out.split() == ["one", "two", "three"]
    assert captured.err.splitlines() == ["2 tokens, CR 2.00"] * 3
    assert speculator.given == {"seed": 1}


def test_interrupted_answer_keeps_what_was_said(
    speculator: FakeSpeculator, piped: Callable[[bytes], None]
) -> None:
    speculator.answers = [["half", KeyboardInterrupt()], ["whole"]]
    piped(b"a\nb\n")
    assert main(["chat"]) == 0
    assert speculator.streams[0].closed
    assert speculator.prompts[1] == [user("a"), {"role": "assistant", "content": "half"}, user("b")]


def test_turn_without_an_answer_is_forgotten(
    speculator: FakeSpeculator,
    piped: Callable[[bytes], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    speculator.answers = [[KeyboardInterrupt()], [InvalidPrompt("too long. /clear")], ["fine"]]
    piped(b"a\nb\nc\n")
    assert main(["chat"]) == 0
    assert speculator.prompts == [[user("a")], [user("b")], [user("c")]]
    assert "selfspec: error: too long. /clear" in capsys.readouterr().err.splitlines()


def test_unknown_chat_command_lists_the_known_ones(
    speculator: FakeSpeculator,
    piped: Callable[[bytes], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    piped(b"/what\n")
    assert main(["chat"]) == 0
    assert capsys.readouterr().err.strip() == chat.HELP
    assert speculator.prompts == []


@pytest.mark.parametrize(
    ("typed", "line"), [(" hi ", "hi"), (EOFError(), None), (KeyboardInterrupt(), "")]
)
def test_terminal_line_ends_the_chat_at_ctrl_d_and_not_at_ctrl_c(
    typed: Any, line: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(prompt: str) -> str:
        if isinstance(typed, BaseException):
            raise typed
        return str(typed)

    monkeypatch.setattr(sys, "stdin", type("Terminal", (), {"isatty": lambda self: True})())
    monkeypatch.setattr("builtins.input", read)
    assert chat.ask() == line


# --- env, heads


def test_env_says_where_things_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["env", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["cache_folder"] == str(tmp_path / "selfspec")
    assert facts["threads"] >= 1
    assert {*env.PACKAGES, "cpu", "device", "default_model", "python"} <= facts.keys()
    assert main(["env"]) == 0
    assert f"cache_folder   {tmp_path / 'selfspec'}\n" in capsys.readouterr().out


def test_env_without_the_default_model_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Path:
        raise ModelNotFound("not installed. Run: pip")

    monkeypatch.setattr(hub, "default_model_file", missing)
    assert env.environment()["default_model"] == "not installed. Run: pip"


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
        "defaults": {"exit_threshold": 0.7},
    }
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    (folder / "model.safetensors").write_bytes(bytes(1_000_000))
    monkeypatch.setattr(hub, "__file__", str(tmp_path / "selfspec" / "hub.py"))
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
    assert lines["defaults"] == '{"exit_threshold": 0.7}'


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


# --- the whole program


def test_help_of_every_command_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["heads"]):
        assert main(arguments) == 0
        shown = capsys.readouterr().out
        assert main([*arguments, "--help"]) == 0
        assert capsys.readouterr().out.rstrip() == shown.rstrip()
    assert main(["generate", "--help"]) == 0
    assert "--max-draft-tokens N" in capsys.readouterr().out


def test_log_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    logging.getLogger("selfspec.hub").info("de-quantising")
    assert capsys.readouterr().err == "selfspec: de-quantising\n"


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    command = [sys.executable, "-c", "from selfspec.cli.main import run; run()", *arguments]
    return subprocess.run(command, text=True, cwd=ROOT, check=False, **options)


@pytest.mark.parametrize(("arguments", "lines"), [(["x"], 1), (["x", "--debug"], 9)])
def test_traceback_is_shown_with_debug_only(arguments: list[str], lines: int) -> None:
    result = run("heads", "show", *arguments, capture_output=True)
    assert result.returncode == (2 if lines == 1 else 1)
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
