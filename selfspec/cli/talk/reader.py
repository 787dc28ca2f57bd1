"""Where turns of a chat come from: a terminal with an editor, or lines of a pipe.

On a terminal a pasted text is one turn, and lines are remembered for the next chat. Imports no
torch; prompt_toolkit where there is a terminal.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from selfspec import files
from selfspec.cli import common
from selfspec.errors import InvalidPrompt, SelfspecError

if TYPE_CHECKING:
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent


class Reader(Protocol):
    """Gives turns."""

    def read(self) -> str | None:
        """The next turn, stripped; empty for one that was dropped, None at the end."""

    def aside(self) -> AbstractContextManager[None]:
        """While open, what is typed is kept for the next turn and not shown."""


def reader(status: Callable[[], str], commands: Iterable[str]) -> Reader:
    """An editor where standard input is a terminal; `status` is the line below it."""
    return Editor(status, commands) if sys.stdin.isatty() else Lines()


class Lines:
    """Standard input that is no terminal: each line is a turn."""

    def read(self) -> str | None:
        """The next line. Raises InvalidPrompt for what is no UTF-8."""
        try:
            line = sys.stdin.readline(common.MOST_PROMPT_BYTES)
        except UnicodeDecodeError as error:
            raise InvalidPrompt(f"the line is not UTF-8: byte {error.start} is wrong") from error
        return line.strip() if line else None

    def aside(self) -> AbstractContextManager[None]:
        """A pipe shows nothing."""
        return nullcontext()


class Editor:
    """A terminal: Enter sends, Alt-Enter or a backslash at the end begins a new line."""

    def __init__(self, status: Callable[[], str], commands: Iterable[str]) -> None:
        """Tab completes `commands`."""
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.output import create_output

        self._session: PromptSession[str] = PromptSession(
            "> ",
            multiline=True,
            prompt_continuation="  ",
            key_bindings=_keys(),
            completer=WordCompleter(list(commands), sentence=True),
            complete_while_typing=False,
            history=_history(),
            bottom_toolbar=lambda: f" {status()}",
            output=create_output(always_prefer_tty=True),
        )

    def read(self) -> str | None:
        """The next turn. Ctrl-C drops what was typed, Ctrl-D on an empty line is the end."""
        try:
            return self._session.prompt().strip()
        except EOFError:
            return None
        except KeyboardInterrupt:
            return ""

    @contextmanager
    def aside(self) -> Iterator[None]:
        """The terminal writes no key of its own into an answer."""
        try:
            import termios
        except ImportError:  # Windows shows none by itself
            yield
            return
        before = termios.tcgetattr(sys.stdin)
        silent = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
        termios.tcsetattr(sys.stdin, termios.TCSANOW, silent)
        try:
            yield
        finally:
            termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


def state_folder() -> Path:
    """What is kept of the user's work: $XDG_STATE_HOME or ~/.local/state, then selfspec."""
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return files.local_path(base) / "selfspec"


def _keys() -> KeyBindings:
    from prompt_toolkit.filters import is_searching
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("enter", filter=~is_searching)
    def send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.current_line_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter", filter=~is_searching)
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def _history() -> History:
    """Lines of earlier chats, in a file that only the user can read; else of this one alone."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class Kept(FileHistory):
        def store_string(self, string: str) -> None:
            with suppress(OSError):  # a full disk ends no chat
                super().store_string(string)

    try:
        path = state_folder() / "chat-history"
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600))
        path.chmod(0o600)
    except (OSError, SelfspecError) as error:
        common.note(f"selfspec: lines are not remembered: {error}")
        return InMemoryHistory()
    return Kept(str(path))
