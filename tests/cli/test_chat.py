"""`selfspec chat`: turns and commands through a pipe, then in a real terminal."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pexpect
import pytest

from selfspec.cli.chat import Writer
from selfspec.decoding.stats import MODEL, Giver
from selfspec.errors import InvalidPrompt
from tests.cli.fakes import Call, FakeSpeculator
from tests.talks import dialogue

ROOT = Path(__file__).parents[2]


# --- a pipe: every line is a turn

ruled, kindly = (partial(dialogue, rule=rule) for rule in ("s", "be kind"))


@pytest.mark.parametrize(
    ("typed", "answers", "asked"),
    [
        (
            "a\n\nb\n/clear\nc\n/quit\nnever\n",
            [["one"], ["two"], ["three"]],
            [ruled("a"), ruled("a", "one", "b"), ruled("c")],
        ),
        # an interrupted answer keeps its text so far
        (
            "a\nb\n",
            [["half", KeyboardInterrupt()], ["whole"]],
            [ruled("a"), ruled("a", "half", "b")],
        ),
        # a turn without an answer is forgotten
        (
            "a\nb\nc\n",
            [[KeyboardInterrupt()], [InvalidPrompt("too long. /clear")], ["fine"]],
            [ruled("a"), ruled("b"), ruled("c")],
        ),
        # the second retry gets no answer: the former answer stays
        (
            "a\n/retry\n/retry\n/system be kind\nb\n/undo\n/undo\nc\n",
            [["one"], ["two"], [KeyboardInterrupt()], ["three"], ["four"]],
            [*[ruled("a")] * 3, kindly("a", "two", "b"), kindly("c")],
        ),
    ],
)
def test_chat_keeps_the_conversation_and_the_changes_of_commands(
    typed: str, answers: list[list[Any]], asked: list[Any], speculator: FakeSpeculator, call: Call
) -> None:
    speculator.answers = list(answers)
    command = ["chat", "--system", "s", "--stats", "--seed", "1"]
    lines = call(command, given=typed.encode()).err.splitlines()
    assert speculator.prompts == asked
    assert speculator.given == {"seed": 1}
    assert not speculator.answers
    figures, errors = "2 tokens, 2.0 tokens per pass", "selfspec: error: too long. /clear"
    wrong = any(isinstance(answer[0], InvalidPrompt) for answer in answers)
    count = sum(isinstance(answer[0], str) for answer in answers)
    assert sorted(lines) == [*[figures] * count, *[errors] * wrong]
    broken = [any(isinstance(p, KeyboardInterrupt) for p in s.pieces) for s in speculator.streams]
    assert [stream.closed for stream in speculator.streams] == broken


def test_chats_are_saved_and_loaded(speculator: FakeSpeculator, call: Call, tmp_path: Path) -> None:
    kept, strange = tmp_path / "talk.json", tmp_path / "strange.json"
    strange.write_text('{"messages": [{"role": "robot", "content": "x"}]}')
    speculator.answers = [["one"], ["two"], ["three"]]
    typed = f"a\n/save {kept}\n/save {strange}\n/load {strange}\nb\n/load {kept}\nc\n"
    output, errors = call(["chat"], given=typed.encode())
    assert f"read {kept}: 1 question\n" in output
    assert json.loads(kept.read_text())["messages"] == dialogue("a", "one")
    assert speculator.prompts[1] == dialogue("a", "one", "b")
    assert speculator.prompts[2] == dialogue("a", "one", "c")
    assert "was not written by selfspec" in errors
    assert "is no conversation" in errors


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/sav x", "unknown command '/sav'. Did you mean /save?"),
        ("/save", "/save needs a file"),
        ("/quit now", "/quit takes no argument"),
        ("/undo", "no question yet"),
        ("/trace", "no answer to trace yet"),
        ("/stats", "no answer yet"),
    ],
)
def test_a_wrong_command_is_reported_on_one_line(
    line: str, words: str, speculator: FakeSpeculator, call: Call
) -> None:
    (message,) = call(["chat"], given=f"{line}\n".encode()).err.splitlines()
    assert words in message
    assert speculator.prompts == []


def test_a_trace_needs_no_file(
    speculator: FakeSpeculator, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced = list[Any]()
    monkeypatch.setattr(
        "selfspec.visualise.look.inspect", lambda _, prompt, **__: MagicMock(asked=prompt)
    )
    monkeypatch.setattr("selfspec.visualise.views.show", lambda trace, _: traced.append(trace))
    call(["chat"], given=b"a\n/trace\n")
    assert [trace.asked for trace in traced] == [dialogue("a")]


# --- a terminal

ANSWERS = """
import itertools, time
from selfspec.cli import base
from selfspec.cli.main import run
from tests.cli import fakes

class Slow(fakes.FakeStream):
    def __iter__(self):
        for piece in super().__iter__():
            time.sleep(0.005)
            yield piece

def echo(self, messages, **options):
    self.prompts.append(messages)
    words = messages[-1]["content"].replace("\\n", "|")
    count = 2000 if words == "long" else 12
    return Slow([f"{word}{number} " for number in range(count) for word in ["<" + words + ">"]])

fakes.FakeSpeculator.stream = echo
fakes.FakeSpeculator.__repr__ = lambda self: f"<{len(self.prompts)} prompts>"
def load(settings):
    base.logger.info("loaded")
    return fakes.FakeSpeculator()

base.load = load
run()
"""

WAITS = "tokens i"
"""The line below the editor, also in a narrow window."""


class Terminal:
    """A chat with a fake model, 40 columns wide. Answers queries for the cursor position."""

    def __init__(self, state: Path, *arguments: str, term: str = "xterm-256color") -> None:
        dropped = ("NO_COLOR", "COLUMNS", "LINES")  # pytest-xdist sets the last two
        inherited = {key: value for key, value in os.environ.items() if key not in dropped}
        changes = {"TERM": term, "XDG_STATE_HOME": str(state)}
        self.process = pexpect.spawn(
            sys.executable,
            ["-c", ANSWERS, "chat", *arguments],
            cwd=ROOT,
            dimensions=(24, 40),
            encoding="utf-8",
            timeout=60,
            env={**inherited, **changes},
        )
        self.expect("> " if term == "dumb" else WAITS)

    def send(self, keys: str) -> None:
        self.process.send(keys)

    def expect(self, pattern: Any) -> None:
        self.seen = ""
        while self.process.expect([r"\x1b\[6n", pattern]) == 0:
            self.seen += self.process.before or ""
            self.process.send("\x1b[1;1R")
        self.seen += self.process.before if isinstance(self.process.before, str) else ""

    def end(self) -> int | None:
        self.expect(pexpect.EOF)
        self.process.close()
        return self.process.exitstatus


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def chat(*arguments: str, **options: str) -> Terminal:
        opened.append(Terminal(tmp_path, *arguments, **options))
        return opened[-1]

    yield chat
    for session in opened:
        session.process.close(force=True)


def test_in_a_terminal(terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    chat = terminal()
    # a pasted page is one turn, in colour, and words wrap
    chat.send("\x1b[200~one\ntwo\x1b[201~\r")
    chat.expect(r"\x1b\[[\d;]*m<one\|two>0")
    chat.expect(r"<one\|two>2\x1b\[0m\r\n\x1b\[[\d;]*m<one\|two>3")
    chat.expect(r"12 tokens in context \| 2.0")
    # Alt-Enter and a backslash begin a new line
    chat.send("a\x1b\rb\\\rc\r")
    chat.expect(r"<a\|b\|c>11")
    chat.expect(WAITS)
    # the text so far survives a smaller window and Ctrl-C, and enters the next prompt
    chat.send("long\r")
    chat.expect("<long>7")
    chat.send("typed ahead")  # not shown in the answer; Ctrl-C drops it
    chat.process.setwinsize(24, 20)
    chat.expect("<long>19")
    assert "typed" not in chat.seen
    chat.send("\x03")
    chat.expect(" …")
    chat.expect(WAITS)
    chat.send("/model\r")
    chat.expect("3 prompts")
    chat.send("/save talk\x7f\x7f\x7f\x7f" + str(tmp_path / "talk") + "\r")
    chat.expect("wrote")
    # the history recalls earlier lines; Ctrl-C at the prompt drops the line
    chat.expect(WAITS)
    chat.send("dropped\x03")
    chat.send("\x1b[A\x1b[A\x1b[A\r")
    chat.expect("<long>0")
    chat.send("\x03")
    chat.expect(" …")
    chat.send("\x04")
    assert chat.end() == 0
    messages = json.loads((tmp_path / "talk").read_text())["messages"]
    assert [entry["content"] for entry in messages[::2]] == ["one\ntwo", "a\nb\nc", "long"]
    assert messages[-1]["content"].startswith("<long>0 <long>1 ")
    history = tmp_path / "selfspec" / "chat-history"
    assert history.stat().st_mode & 0o777 == 0o600
    assert "+long\n" in history.read_text()
    assert "dropped" not in history.read_text()


def test_without_colours(
    speculator: FakeSpeculator, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check `--no-colour`; rich itself handles NO_COLOR."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    speculator.answers = [["one"], ["one"]]
    ways = "--colour", "--no-colour"
    coloured, plain = (call(["chat", way], given=b"a\n").out for way in ways)
    assert coloured != plain == "one\n"


def test_a_dumb_terminal_gets_no_escapes(terminal: Callable[..., Terminal]) -> None:
    chat = terminal(term="dumb")
    seen = chat.seen
    for line, answer in (("hi", "<hi>11"), ("/stats", "2 tokens at"), ("/quit", pexpect.EOF)):
        chat.send(f"{line}\r")
        chat.expect(answer)
        seen += chat.seen
    assert "loaded" in seen
    assert "\x1b" not in seen


def test_no_character_of_an_answer_moves_the_cursor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    writer = Writer(4, colour=False)
    writer.write("a\x1bb\rc\x0cd\x85e\r\nf\tg", Giver(MODEL))
    writer.end()
    assert capsys.readouterr().out == "a\\x1bb c d e\nf    g\n"
