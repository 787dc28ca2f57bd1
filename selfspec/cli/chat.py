"""`selfspec chat`: a conversation on the terminal, in one session that keeps its cache."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from selfspec.cli import common
from selfspec.cli.flags import with_flags
from selfspec.cli.settings import SHARED, settings
from selfspec.errors import InvalidPrompt, SelfspecError

if TYPE_CHECKING:
    from selfspec.api.session import Session

HELP = "/clear starts over, /exit or ctrl-D leaves, ctrl-C stops an answer and keeps what was said"


@with_flags(*SHARED)
def chat(
    *,
    system: common.SystemPrompt = None,
    config: common.ConfigFile = None,
    stats: common.ShowStats = False,
    flags: dict[str, Any],
) -> None:
    """Talk with a model; it remembers the conversation."""
    asked = settings(config, flags)
    speculator = common.load(asked)
    talk = Conversation(
        speculator.session(),
        asked.generation,
        common.opening(system),
        show_stats=stats,
        turn_end=speculator.turn_end.text,
    )
    if sys.stdin.isatty():
        common.note(f"{speculator.label}. {HELP}.")
    while (line := ask()) is not None:
        if line == "/exit":
            break
        if line == "/clear":
            talk.messages = common.opening(system)
        elif line.startswith("/"):
            common.note(HELP)
        elif line:
            talk.reply(line)


@dataclass
class Conversation:
    """What was said so far, and the session that says more."""

    session: Session
    options: dict[str, Any]
    messages: list[dict[str, str]]
    show_stats: bool = False
    turn_end: str = ""
    """What the chat template writes behind an answer, where no token ends it."""

    def reply(self, question: str) -> None:
        """Write the answer to a turn. Interrupted, it keeps what was said; unsaid, no turn."""
        turn = {"role": "user", "content": question}
        try:
            text = self._answer([*self.messages, turn])
        except SelfspecError as error:
            common.complain(error)
            return
        common.emit("\n")
        if text:
            self.messages += [turn, {"role": "assistant", "content": text}]

    def _answer(self, messages: list[dict[str, str]]) -> str:
        stream = self.session.stream(messages, **self.options)
        try:
            for piece in stream:
                common.emit(piece)
        except KeyboardInterrupt:
            stream.close()
            common.emit(" …")
        result = stream.result
        if self.show_stats:
            common.emit("\n")
            common.note(result.stats.line())
        return result.text.removesuffix(self.turn_end)


def ask() -> str | None:
    """The next line, stripped; None at the end of input. Ctrl-C drops the line."""
    try:
        if sys.stdin.isatty():
            return input("> ").strip()
        line = sys.stdin.readline(common.MOST_PROMPT_BYTES)
        return line.strip() if line else None
    except UnicodeDecodeError as error:
        raise InvalidPrompt(f"the line is not UTF-8: byte {error.start} is wrong") from error
    except EOFError:
        common.note("")
        return None
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
        common.note("\n" + HELP)
        return ""
