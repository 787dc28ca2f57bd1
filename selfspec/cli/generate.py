"""`selfspec generate`: one prompt in, one answer out, as text while it comes or as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from selfspec.cli import common
from selfspec.cli.flags import with_flags
from selfspec.cli.settings import SHARED, Settings, settings
from selfspec.errors import InvalidOption
from selfspec.hub.models import DEFAULT_HEADS

if TYPE_CHECKING:
    from selfspec.api.speculator import Speculator
    from selfspec.api.stream import Generation

Messages = str | list[dict[str, str]]


@with_flags(*SHARED)
def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="The question; without it, --file or standard input.")
    ] = None,
    *,
    file: Annotated[
        Path | None, typer.Option("--file", metavar="FILE", help="Read the prompt from a file.")
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without chat template.")
    ] = False,
    system: common.SystemPrompt = None,
    config: common.ConfigFile = None,
    stats: common.ShowStats = False,
    as_json: common.AsJson = False,
    flags: dict[str, Any],
) -> None:
    """Answer a prompt, drafting with exit heads and checking every draft."""
    if raw and system is not None:
        raise InvalidOption("--raw and --system at once: a raw prompt has no messages")
    asked = settings(config, flags)
    text = common.read_prompt(prompt, file, raw=raw)
    speculator = common.load(asked)
    messages: Messages = text if raw else common.conversation(text, system)
    asked.generation["raw"] = raw
    if as_json:
        answer = speculator.generate(messages, **asked.generation)
        common.emit(json.dumps(record(speculator, answer, asked)) + "\n")
    else:
        answer = write(speculator, messages, asked.generation)
    if stats:
        common.note(answer.stats.line())


def write(speculator: Speculator, messages: Messages, options: dict[str, Any]) -> Generation:
    """Write the answer while it comes, with a newline at its end."""
    last = ""
    stream = speculator.stream(messages, **options)
    for piece in stream:
        common.emit(piece)
        last = piece
    if not last.endswith("\n"):
        common.emit("\n")
    return stream.result


def record(speculator: Speculator, answer: Generation, asked: Settings) -> dict[str, Any]:
    """What `--json` prints."""
    heads = asked.loading.get("heads") or DEFAULT_HEADS
    return {
        "text": answer.text,
        "token_ids": answer.token_ids,
        "stop_reason": answer.stop_reason,
        "stats": answer.stats.to_dict(),
        "model": speculator.label,
        "heads": None if speculator.heads is None else heads,
        "options": speculator.options.described() | asked.generation,
    }
