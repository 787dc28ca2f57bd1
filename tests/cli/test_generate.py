"""`selfspec generate`: where prompts come from, where answers go, and one line for each error."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from selfspec.cli import common
from selfspec.cli.main import main
from selfspec.cli.settings import Settings
from selfspec.config import SpeculationOptions
from selfspec.errors import ModelNotFound
from selfspec.hub import models as hub
from tests.cli.fakes import FakeAnswer, FakeSpeculator, FakeStream, user


def errors(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Lines on standard error; standard output must be empty."""
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()


@pytest.mark.parametrize(
    ("flag", "line"),
    [("--stats", "2 tokens, 2.0 tokens per pass\n"), ("--stats=full", "2 tokens, CR 2.00\n")],
)
def test_answer_goes_to_stdout_and_statistics_to_stderr(
    flag: str, line: str, speculator: FakeSpeculator, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", flag, "hi"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "Hello you.\n"
    assert captured.err == line
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
    assert record["options"]["drafter"] == SpeculationOptions().drafter


@pytest.mark.parametrize(
    ("folder", "arguments", "shown"),
    [
        ("/elsewhere/heads", ["--heads", "logit-lens"], "logit-lens"),
        ("/elsewhere/heads", ["--model", "own"], "/elsewhere/heads"),
        (None, [], None),
    ],
)
def test_json_names_the_heads(
    speculator: FakeSpeculator,
    capsys: pytest.CaptureFixture[str],
    folder: str | None,
    arguments: list[str],
    shown: str | None,
) -> None:
    speculator.heads = None if folder is None else SimpleNamespace(folder=Path(folder))
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
        (["generate", "--drafter", "exit:threshold=0.9/x", "hi"], "exit:threshold is '0.9/x'"),
        (["generate", "--drafter", "exit:layers=1.5", "hi"], "exit:layers is '1.5', expected a"),
        (["generate", "--exit-threshold", "0.9", "hi"], "No such option: --exit-threshold"),
        (["generate", "say", "hi"], "argument(s) (hi). Put a prompt of several words in quotes"),
        (["generate", "--hedas", "x", "hi"], "--heads"),
        (
            ["generate", "--config", "not-there.yaml", "hi"],
            "cannot take the config: cannot read not-there.yaml: No such file",
        ),
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
    def fail(settings: Settings) -> None:
        raise ModelNotFound("no model here. Get one")

    monkeypatch.setattr(common, "load", fail)
    assert main(["generate", "hi"]) == 2
    assert errors(capsys) == ["selfspec: error: no model here. Get one"]
    assert main(["generate", "hi"], debug=True) == 2
    shown = errors(capsys)
    assert "Traceback" in shown[0]
    assert shown[-1] == "selfspec: error: no model here. Get one"


def test_interrupt_exits_with_130_and_a_short_line(
    speculator: FakeSpeculator, capsys: pytest.CaptureFixture[str]
) -> None:
    speculator.answers = [["Hel", KeyboardInterrupt()]]
    assert main(["generate", "hi"]) == 130
    captured = capsys.readouterr()
    assert captured.out == "Hel"
    assert captured.err.split() == ["selfspec:", "interrupted"]


def test_a_schema_is_read_from_a_file_before_anything_is_loaded(
    speculator: FakeSpeculator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "schema.json"
    speculator.answers = [["one"], ["two"]]
    file.write_text('{"type": "string"}')
    assert main(["generate", "hi", "--json-schema", str(file)]) == 0
    assert speculator.given["json_schema"] == {"type": "string"}
    capsys.readouterr()
    for content, said in (("{", "is not JSON"), ('{"type": "x"}', "Invalid type"), ("7", "is 7")):
        file.write_text(content)
        assert main(["generate", "hi", "--json-schema", str(file)]) == 2
        (line,) = errors(capsys)
        assert said in line
    grammar = tmp_path / "grammar.lark"
    grammar.write_text('start: "yes" | "no"')
    assert main(["generate", "hi", "--grammar", str(grammar)]) == 0
    assert speculator.given["grammar"] == 'start: "yes" | "no"'
    file.write_text("true")
    both = ["--json-schema", str(file), "--grammar", str(grammar)]
    capsys.readouterr()
    assert main(["generate", "hi", *both]) == 2
    assert "at once" in errors(capsys)[0]


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_an_answer_that_was_cut_says_so_unless_that_was_asked_for(
    command: str,
    speculator: FakeSpeculator,
    piped: Callable[[bytes], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(FakeStream, "result", FakeAnswer(stop_reason="length"))
    for flags, said in (([], True), (["--max-new-tokens", "2"], False), (["-q"], False)):
        speculator.answers = [["one"]]
        piped(b"a\n")
        assert main([command, *flags]) == 0
        shown = "cut after 2 tokens; more: --max-new-tokens" in capsys.readouterr().err
        assert shown is said
