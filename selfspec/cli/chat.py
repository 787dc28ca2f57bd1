"""`selfspec chat`: a conversation on the terminal, in one session that keeps its cache."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from selfspec.cli import common
from selfspec.cli.flags import with_flags
from selfspec.cli.settings import SHARED, settings

Colour = Annotated[
    bool | None,
    typer.Option(
        "--colour/--no-colour", help="Tokens in the colour of who gave them; else as NO_COLOR says."
    ),
]


@with_flags(*SHARED)
def chat(
    *,
    system: common.SystemPrompt = None,
    config: common.ConfigFile = None,
    stats: common.ShowStats = None,
    colour: Colour = None,
    flags: dict[str, Any],
) -> None:
    """Talk with a model. It remembers the conversation; /help lists what else it understands."""
    asked = settings(config, flags)
    from selfspec.cli.talk.commands import COMMANDS, Talk
    from selfspec.cli.talk.conversation import Conversation
    from selfspec.cli.talk.reader import reader
    from selfspec.cli.talk.writer import Writer

    speculator = common.load(asked)
    talk = Talk(
        Conversation(speculator, asked.generation, system),
        Writer(speculator.backbone.num_layers, colour=colour),
        stats,
    )
    if sys.stdin.isatty():
        common.note(f"{speculator.label}. /help lists commands and keys, Ctrl-D leaves.")
    turns = reader(talk.status, COMMANDS)
    while not talk.ended and (line := turns.read()) is not None:
        if line:
            with turns.aside():
                talk.take(line)
