"""Chat templates: programs from outside, run with bounds.

Comes in: a tokenizer and messages. Goes out: the text that its template makes of them, or one line
that says why not. Called where prompts and conversations become ids. The template runs in a process
of its own (`rendering`), which starts in a tenth of a second and is kept: later texts take less
than a millisecond more than in this process.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import IO, Any, cast

from transformers import PreTrainedTokenizerBase

from selfspec.api import rendering
from selfspec.errors import InvalidPrompt

_MOST_CHARACTERS = 1 << 20
"""Of a text, and eight for each that comes in."""

_KEPT = 2
"""Processes that wait for work, of 25 MB each; while more threads ask there are more."""


class CannotRender(Exception):
    """Why a template gives no text, in one line."""

    line: int | None = None
    """Of the template, where that is known."""


def templated(
    tokenizer: PreTrainedTokenizerBase,
    messages: Any,
    *,
    tools: list[Any] | None = None,
    add_generation_prompt: bool = False,
) -> str:
    """The text that `apply_chat_template` gives.

    Raises InvalidPrompt for messages that the template does not take, for its own mistakes, and for
    one that runs without end or fills the memory.
    """
    try:
        template = tokenizer.get_chat_template(tools=tools)
        tokens = [name for name in tokenizer.special_tokens_map if name.isidentifier()]
        names = ("messages", "tools", "documents", "add_generation_prompt", *tokens)
        # a template of ours makes transformers hand out what it prepared for the other
        shown = ", ".join(f"'{name}': {name}" for name in names)
        variables = tokenizer.apply_chat_template(
            messages,
            tools=tools,
            chat_template=f"{{{{ {{{shown}}} | tojson }}}}",
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
        )
        return _rendered(template, str(variables))
    except Exception as error:
        reason = " ".join(str(error).split())
        raise InvalidPrompt(
            f"the chat template does not take these messages: {reason or type(error).__name__}. "
            "Give other messages, or a raw prompt"
        ) from error


def render(template: str, variables: Mapping[str, Any]) -> str:
    """What a template makes of plain values. Raises CannotRender."""
    return _rendered(template, json.dumps(variables))


def _rendered(template: str, variables: str) -> str:
    most = _MOST_CHARACTERS + 8 * len(variables)
    child = _taken()
    try:
        said = _asked(child, json.dumps([template, variables, most]))
    except BaseException:  # in the middle of an answer it is of no more use
        _end(child, kill=True)
        raise
    if not said:
        _end(child)
        late = f"it ran for more than {rendering.SECONDS} s"
        reasons = {rendering.LATE: late, rendering.FULL: "it fills the memory"}
        status = child.returncode
        raise CannotRender(reasons.get(status, f"it ended its process with status {status}"))
    if len(_idle) < _KEPT:
        _idle.append(child)
    else:
        _end(child)
    text, reason, number = json.loads(said)
    if text is None:
        error = CannotRender(reason)
        error.line = number
        raise error
    return str(text)


# --- processes ------------------------------------------------------------------------------------

_idle: list[subprocess.Popen[str]] = []


def start() -> None:
    """Have a process at hand: it starts while the caller does something else."""
    if not _idle:
        with suppress(CannotRender):
            _idle.append(_new())


def _taken() -> subprocess.Popen[str]:
    """A process that waits for work, or a new one. Raises CannotRender."""
    with suppress(IndexError):
        while (child := _idle.pop()).poll() is not None:
            _end(child)
        return child
    return _new()


def _new() -> subprocess.Popen[str]:
    try:
        return subprocess.Popen(
            [sys.executable, rendering.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
        )
    except OSError as error:
        raise CannotRender(f"no process can be started for it: {error.strerror}") from error


def _asked(child: subprocess.Popen[str], line: str) -> str:
    """Its answer; empty where it ended."""
    question, answer = cast(IO[str], child.stdin), cast(IO[str], child.stdout)
    with suppress(BrokenPipeError):
        question.write(f"{line}\n")
        question.flush()
    return answer.readline()


def _end(child: subprocess.Popen[str], *, kill: bool = False) -> None:
    if kill:
        child.kill()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()
    child.wait()


@atexit.register
def _end_all() -> None:
    while _idle:
        _end(_idle.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_idle.clear)  # they belong to the process that forked
