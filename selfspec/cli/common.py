"""What the commands share: getting a speculator, reading prompts, writing results and notes.

Results go to standard output through `emit`, everything else to standard error through `note`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from selfspec import untrusted
from selfspec.cli import early, streams
from selfspec.errors import CannotWrite, InvalidData, InvalidPrompt, SelfspecError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from selfspec.api.speculator import Speculator
    from selfspec.api.stream import Generation
    from selfspec.cli.settings import Settings

logger = logging.getLogger(__name__)

INTERRUPTED = 130  # 128 + SIGINT, as shells have it
PIPE_CLOSED = 141  # 128 + SIGPIPE

MOST_PROMPT_BYTES = 4 << 20
"""About a million tokens, more than any model takes."""

_LONGEST_LINE = 2000
"""Characters of an error: a name or a value in it may be of any length."""

ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="YAML file of options; flags win over it, it over the user's own (see env).",
        envvar="SELFSPEC_CONFIG",
        show_envvar=False,
    ),
]
SystemPrompt = Annotated[
    str | None,
    typer.Option("--system", metavar="TEXT", help="System message ahead of the conversation."),
]


class Stats(str, Enum):
    """How much is said of an answer."""

    SHORT = "short"
    FULL = "full"


ShowStats = Annotated[
    Stats | None,
    typer.Option(
        "--stats",
        metavar="[=full]",
        help="What the answer took, on standard error; =full: all figures.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON value on standard output.")]


def load(settings: Settings) -> Speculator:
    """The speculator that the flags ask for; this is where torch is imported."""
    early.check(settings.loading, settings.speculation)
    from selfspec.api import speculator as generate

    return generate.load(**settings.loading, **settings.speculation)


def emit(text: str) -> None:
    """Write results at once. Leaves quietly when nobody reads them any more.

    Raises CannotWrite where standard output takes nothing.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        streams.silence(sys.stdout)
        raise typer.Exit(PIPE_CLOSED) from None
    except OSError as error:
        streams.silence(sys.stdout)
        raise CannotWrite(f"cannot write standard output: {error.strerror}") from error


def statistics(answer: Generation, kind: Stats) -> str:
    """The line that `--stats` asked for."""
    return answer.stats.line() if kind is Stats.FULL else answer.summary()


def say_if_cut(answer: Generation, options: Mapping[str, Any]) -> None:
    """A line about an answer that was cut by a limit that nobody asked for."""
    if answer.stop_reason == "length" and "max_new_tokens" not in options:
        count = len(answer.token_ids)
        logger.info("the answer was cut after %d tokens; more: --max-new-tokens", count)


def rendered(grid: Table) -> str:
    """A table as text; never wrapped where it is not for a terminal."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 1000
    with console.capture() as capture:
        console.print(grid)
    return "".join(f"{line.rstrip()}\n" for line in capture.get().splitlines())


def printed(show: Callable[[Console], None]) -> str:
    """What `show` prints on a console like standard output, colours included where it has them."""
    from rich.console import Console

    console = Console(highlight=False)
    with console.capture() as capture:
        show(console)
    return capture.get()


def note(text: str) -> None:
    """Write a line that is not a result."""
    typer.echo(text, err=True)


def complain(error: SelfspecError | str) -> None:
    """Write an error as its one line, without what would move a terminal's cursor."""
    words = " ".join(str(error).split())
    words = words if len(words) <= _LONGEST_LINE else f"{words[:_LONGEST_LINE]} …"
    note("selfspec: error: " + "".join(c if c.isprintable() else ascii(c)[1:-1] for c in words))


def read_prompt(prompt: str | None, file: Path | None, *, raw: bool) -> str:
    """The prompt from the argument, the file, or standard input; one of them.

    A newline at the end of a file or of standard input is dropped unless `raw`. Raises
    InvalidPrompt when there is nothing to read, or when it is empty or not UTF-8.
    """
    if prompt is not None and file is not None:
        raise InvalidPrompt("a prompt and --file at once, expected one. Leave one of them out")
    text = _typed(prompt) if prompt is not None else _read(file)
    if prompt is None and not raw:
        text = text.rstrip("\r\n")
    if not text.strip():
        raise InvalidPrompt("the prompt is empty. Give some text")
    return text


def conversation(text: str, system: str | None) -> list[dict[str, str]]:
    """Messages of one user turn, behind a system message if there is one."""
    return [*opening(system), {"role": "user", "content": text}]


def opening(system: str | None) -> list[dict[str, str]]:
    """Messages ahead of the first turn."""
    return [] if system is None else [{"role": "system", "content": system}]


def _typed(prompt: str) -> str:
    """An argument; bytes that are no UTF-8 come from the shell as lone surrogates."""
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidPrompt(f"the prompt is not UTF-8: {error.reason}") from error
    return prompt


def _read(file: Path | None) -> str:
    """A file, or standard input where it is not a terminal."""
    if file is None and sys.stdin.isatty():
        raise InvalidPrompt("no prompt. Give one as an argument, with --file, or through a pipe")
    try:
        if file is not None:
            return untrusted.read_bytes(file, MOST_PROMPT_BYTES).decode("utf-8")
        data = sys.stdin.buffer.read(MOST_PROMPT_BYTES + 1)
        if len(data) > MOST_PROMPT_BYTES:
            raise InvalidPrompt(f"the prompt has more than {MOST_PROMPT_BYTES} bytes")
        return data.decode("utf-8")
    except (OSError, InvalidData) as error:
        raise InvalidPrompt(f"cannot read the prompt: {error}") from error
    except UnicodeDecodeError as error:
        raise InvalidPrompt(f"the prompt is not UTF-8: byte {error.start} is wrong") from error
