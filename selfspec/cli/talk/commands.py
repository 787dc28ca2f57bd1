"""What a line that begins with a slash does in `selfspec chat`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from selfspec import files
from selfspec.api.givers import NAMES, Giver
from selfspec.cli import common
from selfspec.cli.talk.conversation import Conversation
from selfspec.cli.talk.writer import Writer
from selfspec.decoding.sources import EXIT
from selfspec.errors import InvalidOption, SelfspecError
from selfspec.typed import check_keys

KEYS = (
    "Enter sends, Alt-Enter or a backslash at the end of a line begins a new one. A pasted text is "
    "one turn. Up and down recall earlier lines, Tab completes commands. Ctrl-C stops an answer "
    "and keeps what was said, Ctrl-D leaves."
)

_LONG = 2000
"""Characters of a turn that take a second to read, so that somebody waits."""


@dataclass
class Talk:
    """A chat at work: turns and commands come in, what was asked for is written."""

    conversation: Conversation
    writer: Writer
    stats: common.Stats | None = None
    """What is said behind each answer."""
    ended: bool = False

    def take(self, line: str) -> None:
        """A turn or a command. What is wrong with it is said, and the chat goes on."""
        try:
            if line.startswith("/") and "\n" not in line:
                self._command(line)
            else:
                self._reply(line)
        except SelfspecError as error:
            common.complain(error)
        except KeyboardInterrupt:  # beside an answer: a command is stopped, the chat goes on
            if not sys.stdin.isatty():
                raise
            self.writer.end(" …\n")

    def status(self) -> str:
        """The line below the editor."""
        talk = self.conversation
        parts = [talk.speculator.label, f"{talk.tokens} tokens in context"]
        if talk.last is not None and talk.last.stats.rounds:
            rate = talk.last.stats.compression_rate
            parts.append(f"{rate:.1f} tokens per pass")
        return " | ".join(parts)

    def _command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        check_keys([name], COMMANDS, "command")
        command, given = COMMANDS[name], rest.strip()
        if given and not command.takes:
            raise InvalidOption(f"{name} takes nothing behind it. Leave {given!r} out")
        if not given and command.takes.isalpha():
            raise InvalidOption(f"{name} needs a {command.takes.lower()}. Name one")
        command.act(self, given)

    def _reply(self, question: str) -> None:
        talk = self.conversation
        before = talk.last
        if len(question) > _LONG:
            self.writer.waiting(f"reading {len(question):,} characters …")
        try:
            whole = talk.ask(question, self.writer.piece)
        except SelfspecError:
            self.writer.end("")
            raise
        self.writer.end("\n" if whole else " …\n")
        if whole and talk.last is not None and talk.last is not before:
            common.say_if_cut(talk.last, talk.options)
        if self.stats is not None and talk.last is not None and talk.last is not before:
            common.note(common.statistics(talk.last, self.stats))

    def help(self, _: str) -> None:
        """Commands, keys, colours."""
        terms = [f"{name} {command.takes}".rstrip() for name, command in COMMANDS.items()]
        width = max(map(len, terms))
        for term, command in zip(terms, COMMANDS.values(), strict=True):
            self.writer.entry(f"{term:<{width}}  ", command.text)
        self.writer.line(KEYS)
        if self.writer.colour:
            self.writer.line("The colour of a token says who gave it:")
            speculator = self.conversation.speculator
            heads = speculator.heads
            layers = () if heads is None else heads.layers_in_use(speculator.options)
            for giver in (*map(Giver, NAMES), *(Giver(EXIT, layer) for layer in layers)):
                style = giver.colour(speculator.backbone.num_layers) or ""
                self.writer.line(f"  {giver.words}", style)

    def figures(self, _: str) -> None:
        """Of the last answer."""
        last = self.conversation.last
        if last is None:
            raise InvalidOption("there is no answer yet. Ask something")
        for kind in common.Stats:
            self.writer.line(common.statistics(last, kind))

    def undo(self, _: str) -> None:
        """The last turn."""
        if (question := self.conversation.undo()) is None:
            raise InvalidOption("there is nothing to take back")
        self.writer.line(f"taken back: {question.splitlines()[0]}")

    def retry(self, _: str) -> None:
        """The last turn again; its answer stays where there is no new one."""
        talk = self.conversation
        kept, last, tokens = talk.messages, talk.last, talk.tokens
        if (question := talk.undo()) is None:
            raise InvalidOption("there is no question yet. Ask something")
        try:
            self._reply(question)
        finally:
            if talk.last is None:
                talk.messages, talk.last, talk.tokens = kept, last, tokens

    def system(self, text: str) -> None:
        """Show or set."""
        if text:
            self.conversation.instruct(text)
        found = self.conversation.messages[:1]
        is_set = bool(found) and found[0]["role"] == "system"
        self.writer.line(f"system: {found[0]['content']}" if is_set else "no system message")

    def clear(self, _: str) -> None:
        """Start over."""
        self.conversation.clear()

    def save(self, name: str) -> None:
        """To a file."""
        self.conversation.save(files.local_path(name))
        self.writer.line(f"wrote {name}")

    def load(self, name: str) -> None:
        """From a file."""
        self.conversation.load(files.local_path(name))
        turns = sum(entry["role"] == "user" for entry in self.conversation.messages)
        self.writer.line(f"read {name}: {turns} questions")

    def trace(self, name: str) -> None:
        """The last answer, layer by layer."""
        _trace(self.conversation, self.writer, name)

    def model(self, _: str) -> None:
        """What answers."""
        self.writer.line(repr(self.conversation.speculator).strip("<>"))

    def colour(self, _: str) -> None:
        """On or off."""
        self.writer.colour = not self.writer.colour
        self.writer.line(f"colours are {'on' if self.writer.colour else 'off'}")

    def quit(self, _: str) -> None:
        """Leave."""
        self.ended = True


def _trace(talk: Conversation, writer: Writer, name: str) -> None:
    """The last answer is written once more, and each layer asked what it made of it."""
    if talk.last is None:
        raise InvalidOption("there is no answer to trace yet. Ask something")
    path = files.local_path(name) if name else None
    if path is not None:
        if path.suffix not in (".html", ".jsonl"):
            raise InvalidOption(f"{path}: expected a name that ends in .html or .jsonl")
        files.check_file(path, overwrite=True)
    from selfspec.cli.trace import replayable
    from selfspec.visualise import look, page, terminal

    options = talk.options | {"max_new_tokens": len(talk.last.token_ids)}
    found = look.inspect(talk.speculator, talk.messages[:-1], **options)
    if [place.token for place in found.places] != talk.last.token_ids:
        common.note("selfspec: drawn anew, the answer is another one: this is its trace")
    if path is None:
        common.emit(common.printed(lambda console: terminal.show(found, console)))
        return
    if path.suffix == ".html":
        seen = replayable(talk.speculator, talk.messages[:-1], found, options["max_new_tokens"])
        files.write(path, page.render(*seen))
    else:
        found.save(path)
    writer.line(f"wrote {name}")


class Command(NamedTuple):
    """What may stand behind its name (in brackets: need not), what it does, and how."""

    takes: str
    text: str
    act: Callable[[Talk, str], None]


COMMANDS = {
    "/help": Command("", "these lines", Talk.help),
    "/stats": Command("", "what the last answer took", Talk.figures),
    "/undo": Command("", "take back the last question and its answer", Talk.undo),
    "/retry": Command("", "ask it again (the same answer, unless tokens are drawn)", Talk.retry),
    "/system": Command("[TEXT]", "set the system message, or show it", Talk.system),
    "/clear": Command("", "start over; the system message stays", Talk.clear),
    "/save": Command("FILE", "keep the conversation in a file", Talk.save),
    "/load": Command("FILE", "go on with a conversation from a file", Talk.load),
    "/trace": Command(
        "[FILE]", "who gave each token of the last answer; .html: a page", Talk.trace
    ),
    "/model": Command("", "what answers, and how it runs", Talk.model),
    "/colour": Command("", "colours on or off", Talk.colour),
    "/quit": Command("", "leave, as Ctrl-D does", Talk.quit),
}
