"""`selfspec chat`: a conversation on the terminal, in one session that keeps its KV cache.

Turns come from an editor on a terminal, or are the lines of a pipe; a line that begins with a slash
is a command. Imports no torch, and rich and prompt_toolkit only where they are needed.
"""

from __future__ import annotations

import json
import os
import re
import sys
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from selfspec import files
from selfspec.cli import base, interrupts
from selfspec.cli.base import SHARED, Args, Flag, with_flags
from selfspec.decoding.stats import EXIT, SOURCES, Giver, counted, rate
from selfspec.errors import InvalidData, InvalidOption, InvalidPrompt, SelfspecError, check_keys

if TYPE_CHECKING:
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyPressEvent

    from selfspec.api.speculator import Speculator
    from selfspec.api.stream import Generation


@with_flags(
    base.SYSTEM,
    base.STATS,
    Flag("colour", bool, "Colour tokens by what drafted them. Default: as NO_COLOR says."),
    *SHARED,
)
def chat(*, args: base.Given) -> None:
    """Talk with a model. It remembers the conversation; /help lists its commands."""
    options = base.answer_options(args)
    base.check_template(args)
    talk = Chat(base.load(args), options, args)
    read = _read_line
    if sys.stdin.isatty():
        base.note(f"{talk.speculator.label}. /help lists commands and keys, Ctrl-D leaves.")
        read = _editor(talk.status)
    while not talk.ended and (line := read()) is not None:
        if line:
            with _hide_keys():
                talk.take(line)
            interrupts.clear()  # whatever Ctrl-C was meant to stop has ended


class Chat:
    """A running conversation: takes turns and commands, and writes answers."""

    def __init__(self, speculator: Speculator, options: dict[str, Any], args: Args) -> None:
        self.speculator = speculator
        self.options = options  # for each answer, as `generate` takes them
        self.stats: base.Stats | None = args.get("stats")
        self.writer = Writer(speculator.backbone.num_layers, colour=args.get("colour"))
        self.messages = base.conversation(args.get("system"))
        self.tokens = 0  # in the context that the model has seen
        self.last_answer: Generation | None = None  # the newest answer, unless it was taken back
        self.ended = False
        self._session = speculator.session()

    def take(self, line: str) -> None:
        """Take a turn or a command. Errors are printed, and the chat continues."""
        try:
            if not line.startswith("/") or "\n" in line:
                self._reply(line)
                return
            name, _, rest = line.partition(" ")
            check_keys([name], COMMANDS, "command")
            (metavar, _, act), argument = COMMANDS[name], rest.strip()
            if argument and not metavar:
                raise InvalidOption(f"{name} takes no argument. Leave {argument!r} out")
            if not argument and metavar.isalpha():
                raise InvalidOption(f"{name} needs a {metavar.lower()}. Name one")
            act(self, argument)
        except SelfspecError as error:
            base.complain(error)
        except KeyboardInterrupt:  # not in an answer: only the command is stopped
            if not sys.stdin.isatty():
                raise
            self.writer.end(" …\n")

    def status(self) -> str:
        parts = [self.speculator.label, f"{counted(self.tokens, 'token')} in context"]
        if self.last_answer is not None and self.last_answer.stats.rounds:
            parts.append(rate(self.last_answer.stats.decode_tokens_per_s))
            parts.append(f"{self.last_answer.stats.compression_rate:.1f} tokens per pass")
        return " | ".join(parts)

    def _reply(self, question: str) -> None:
        """Answer a turn. Text cut by Ctrl-C stays; a turn without any text is forgotten."""
        messages = [*self.messages, *base.conversation(None, question)]
        end = ""  # after an error, which is printed itself
        try:
            stream = self._session.stream(messages, **self.options)
            try:
                for piece in stream:
                    self.writer.write(piece, stream.giver)
                end = "\n"
            except KeyboardInterrupt:
                stream.close()
                end = " …\n"
        finally:
            self.writer.end(end)
        answer = stream.result
        if not answer.text:
            return
        self.messages = [*messages, {"role": "assistant", "content": answer.text}]
        self.tokens = answer.stats.prompt_tokens + answer.stats.new_tokens
        self.last_answer = answer
        if end == "\n":
            base.say_if_cut(answer, self.options)
        if self.stats is not None:
            base.to_stderr(base.statistics(answer, self.stats))

    def _replace(self, messages: list[dict[str, str]]) -> None:
        self.messages, self.last_answer, self.tokens = messages, None, 0
        tokenizer = self.speculator.tokenizer
        if tokenizer is not None and any(message["role"] == "user" for message in messages):
            from selfspec.api.text import encode

            variables = self.options.get("chat_template_kwargs")
            with suppress(InvalidPrompt):
                self.tokens = encode(tokenizer, list(messages), variables=variables).shape[1]

    def _take_back(self) -> str:
        for index, message in reversed([*enumerate(self.messages)]):
            if message["role"] == "user":
                self._replace(self.messages[:index])
                return message["content"]
        raise InvalidOption("there is no question yet. Ask something")

    def _help(self, _: str) -> None:
        from rich.table import Table
        from rich.text import Text

        grid = Table.grid(padding=(0, 2, 0, 0))
        for name, (metavar, text, _act) in COMMANDS.items():
            grid.add_row(Text(f"{name} {metavar}"), Text(text))
        base.emit(base.table_text(grid))
        self.writer.write_line(
            "Enter sends, Alt-Enter or a backslash at the end of a line begins a new one. A pasted "
            "text is one turn. Up and down recall earlier lines, Tab completes commands. Ctrl-C "
            "stops an answer and keeps what was said, Ctrl-D leaves."
        )
        if self.writer.colour:
            self.writer.write_line("The colour of a token says where it came from:")
            heads, options = self.speculator.heads, self.speculator.options
            layers = () if heads is None else heads.layers_in_use(options)
            givers = [Giver(source) for source in SOURCES if source != EXIT]
            for giver in (*givers, *(Giver(EXIT, layer) for layer in layers)):
                style = giver.colour(self.speculator.backbone.num_layers) or ""
                self.writer.write_line(f"  {giver.words}", style)

    def _stats(self, _: str) -> None:
        if self.last_answer is None:
            raise InvalidOption("there is no answer yet. Ask something")
        self.writer.write_line(base.statistics(self.last_answer, "short"))
        self.writer.write_line(base.statistics(self.last_answer, "full"))

    def _undo(self, _: str) -> None:
        self.writer.write_line(f"taken back: {self._take_back().splitlines()[0]}")

    def _retry(self, _: str) -> None:
        state = self.messages, self.last_answer, self.tokens
        question = self._take_back()
        try:
            self._reply(question)
        finally:
            if self.last_answer is None:  # without a new answer, the old one stays
                self.messages, self.last_answer, self.tokens = state

    def _system(self, text: str) -> None:
        if text:
            others = [message for message in self.messages if message["role"] != "system"]
            self._replace([*base.conversation(text), *others])
        texts = [message["content"] for message in self.messages[:1] if message["role"] == "system"]
        self.writer.write_line(f"system: {texts[0]}" if texts else "no system message")

    def _clear(self, _: str) -> None:
        self._replace([message for message in self.messages[:1] if message["role"] == "system"])

    def save(self, name: str) -> None:
        values = {"made_by": "selfspec chat", "model": self.speculator.label}
        path = files.check_file(files.local_path(name), overwrite=True)
        text = json.dumps(values | {"messages": self.messages}, indent=2, ensure_ascii=False)
        files.write(path, text + "\n")
        self.writer.write_line(f"wrote {name}")

    def _load(self, name: str) -> None:
        values = files.read_json(path := files.local_path(name))
        messages: list[dict[str, str]] = []
        entries = values.get("messages") if isinstance(values, dict) else None
        for entry in entries if isinstance(entries, list) else [None]:
            match entry:
                case {"role": "system" | "user" | "assistant" as role, "content": str(content)}:
                    messages.append({"role": role, "content": content})
                case _:
                    raise InvalidData(f"{path} is no conversation. Give a file that /save wrote")
        self._replace(messages)
        turns = sum(message["role"] == "user" for message in messages)
        self.writer.write_line(f"read {name}: {counted(turns, 'question')}")

    def _trace(self, name: str) -> None:
        if self.last_answer is None:
            raise InvalidOption("there is no answer to trace yet. Ask something")
        path = files.check_file(files.local_path(name), overwrite=True) if name else None
        if path is not None and path.suffix not in (".html", ".jsonl"):
            raise InvalidOption(f"{path}: expected a name that ends in .html or .jsonl")
        from rich.console import Console

        from selfspec.visualise import look, views

        options = self.options | {"max_new_tokens": len(self.last_answer.token_ids)}
        base.note("answering again, to look at each layer")
        trace = look.inspect(self.speculator, self.messages[:-1], **options)
        if [place.token for place in trace.places] != self.last_answer.token_ids:
            base.note("selfspec: sampling again gave another answer, which this trace shows")
        if path is None:
            views.show(trace, Console(highlight=False))
            return
        if path.suffix == ".html":
            files.write(path, views.render(trace))
        else:
            trace.save(path)
        self.writer.write_line(f"wrote {name}")

    def _model(self, _: str) -> None:
        self.writer.write_line(repr(self.speculator).strip("<>"))

    def _colour(self, _: str) -> None:
        self.writer.colour = not self.writer.colour
        self.writer.write_line(f"colours are {'on' if self.writer.colour else 'off'}")

    def _quit(self, _: str) -> None:
        self.ended = True


COMMANDS: dict[str, tuple[str, str, Callable[[Chat, str], None]]] = {
    "/help": ("", "these lines", Chat._help),
    "/stats": ("", "time, tokens and drafts of the last answer", Chat._stats),
    "/undo": ("", "take back the last question and its answer", Chat._undo),
    "/retry": ("", "ask the last question again (same answer unless sampled)", Chat._retry),
    "/system": ("[TEXT]", "set the system message, or show it", Chat._system),
    "/clear": ("", "start over; the system message stays", Chat._clear),
    "/save": ("FILE", "save the conversation to a file", Chat.save),
    "/load": ("FILE", "continue a conversation from a file", Chat._load),
    "/trace": ("[FILE]", "where tokens of the last answer came from; .html: a page", Chat._trace),
    "/model": ("", "the model, and how it runs", Chat._model),
    "/colour": ("", "colours on or off", Chat._colour),
    "/quit": ("", "leave, as Ctrl-D does", Chat._quit),
}
"""By name: the argument (in brackets: optional), what the command does, and its function."""

# --- readers of turns: each returns the next one, stripped, or None at the end


def _read_line() -> str | None:
    """Read a line of standard input that is not a terminal."""
    try:
        line = sys.stdin.readline(base.MOST_PROMPT_BYTES)
    except UnicodeDecodeError as error:
        raise InvalidPrompt(f"the line is not UTF-8: byte {error.start} is wrong") from error
    return line.strip() if line else None


def _editor(status: Callable[[], str]) -> Callable[[], str | None]:
    """A reader for terminals; `status` is the line below the editor. A pasted text is one turn."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.application import create_app_session
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.filters import is_searching
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.output import create_output
    from prompt_toolkit.output.plain_text import PlainTextOutput
    from prompt_toolkit.utils import is_dumb_terminal

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

    dumb = is_dumb_terminal()  # its cursor cannot be moved
    output = PlainTextOutput(sys.stdout) if dumb else create_output(always_prefer_tty=True)
    with create_app_session(output=output):
        session: PromptSession[str] = PromptSession(
            "> ",
            multiline=True,
            prompt_continuation="  ",
            key_bindings=keys,
            completer=WordCompleter(list(COMMANDS), sentence=True),
            complete_while_typing=False,
            history=_history(),
            bottom_toolbar=lambda: f" {status()}",
        )

    def read() -> str | None:
        try:
            return session.prompt().strip()
        except EOFError:  # Ctrl-D on an empty line
            return None
        except KeyboardInterrupt:  # drops what was typed
            return ""

    return read


def _history() -> History:
    """Lines of earlier chats, in a file that only the user can read; else of this chat alone."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class Kept(FileHistory):
        def store_string(self, string: str) -> None:
            with suppress(OSError):  # a full disk ends no chat
                super().store_string(string)

    try:
        state = files.local_path(os.environ.get("XDG_STATE_HOME") or "~/.local/state")
        path = state / "selfspec" / "chat-history"
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600))
        path.chmod(0o600)
    except (OSError, SelfspecError) as error:
        base.note(f"selfspec: lines are not remembered: {error}")
        return InMemoryHistory()
    return Kept(str(path))


@contextmanager
def _hide_keys() -> Iterator[None]:
    """Keep what is typed meanwhile for the next turn, without showing it on the terminal."""
    if os.name == "nt" or not sys.stdin.isatty():  # Windows does not show it anyway
        yield
        return
    import termios

    attributes = termios.tcgetattr(sys.stdin)
    silent = [*attributes[:3], attributes[3] & ~termios.ECHO, *attributes[4:]]
    termios.tcsetattr(sys.stdin, termios.TCSANOW, silent)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, attributes)


# --- text of answers on the terminal


class Writer:
    """Writes answers, wrapped at words, each piece in the colour of its giver.

    If standard output is not a terminal, pieces are written unchanged.
    """

    def __init__(self, num_layers: int, *, colour: bool | None = None) -> None:
        """`colour` None: as the terminal and NO_COLOR say."""
        from rich.console import Console
        from rich.text import Text

        no_color = None if colour is None else not colour
        self._console = Console(highlight=False, no_color=no_color, soft_wrap=True)
        self._num_layers = num_layers
        self._column = 0
        self._gap = ""  # spaces that are written only if the next word fits
        self._word = Text()

    @property
    def colour(self) -> bool:
        console = self._console
        return console.is_terminal and not console.no_color and console.color_system is not None

    @colour.setter
    def colour(self, wanted: bool) -> None:
        self._console.no_color = not wanted

    def write(self, text: str, giver: Giver) -> None:
        """Write some text; a word at its end waits until it is complete."""
        if not self._console.is_terminal:
            base.emit(text)
            return
        from rich.cells import cell_len

        style = giver.colour(self._num_layers) or ""
        for part in re.findall(r"\n|[^\S\n]+|\S+", text):
            if part == "\n":
                self.end()
            elif part.isspace():
                self._end_word()
                self._gap += re.sub(r"\s", " ", part.expandtabs(4))  # some move the cursor
            else:
                wide = cell_len(part) > len(part)  # scripts without spaces may break anywhere
                for chunk in part if wide else [part]:
                    if wide:
                        self._end_word()
                    self._word.append(_escape(chunk), style)
            if self._word.cell_len >= self._console.width:
                self._end_word()

    def end(self, ending: str = "\n") -> None:
        self._end_word()
        self._new_line(ending)

    def write_line(self, text: str, style: str = "") -> None:
        from rich.text import Text

        self._console.print(Text(text, style), soft_wrap=not self._console.is_terminal)

    def _end_word(self) -> None:
        """Write the waiting word, on a new line if it does not fit."""
        if not self._word:
            return
        cells = len(self._gap) + self._word.cell_len
        if self._column and self._column + cells >= self._console.width:
            self._new_line()
        self._column += len(self._gap) + self._word.cell_len
        self._console.print(self._gap, self._word, sep="", end="", soft_wrap=True)
        self._gap, self._word = "", self._word.blank_copy()

    def _new_line(self, end: str = "\n") -> None:
        base.emit(end)
        self._column, self._gap = 0, ""


def _escape(text: str) -> str:
    """Escape control characters, which could move the cursor."""
    return "".join(c if unicodedata.category(c) != "Cc" else f"\\x{ord(c):02x}" for c in text)
