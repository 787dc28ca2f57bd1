"""`selfspec generate`: one prompt in, one answer out, as text while it comes or as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from selfspec import files
from selfspec.cli import common
from selfspec.cli import prompts as many
from selfspec.cli.flags import with_flags
from selfspec.cli.settings import SHARED, Settings, settings
from selfspec.errors import InvalidOption
from selfspec.hub.models import heads_name

if TYPE_CHECKING:
    from selfspec.api.speculator import Speculator
    from selfspec.api.stream import Generation

Messages = str | list[dict[str, str]]

Prompts = Annotated[
    Path | None,
    typer.Option(
        "--prompts",
        metavar="FILE",
        help='Answer many: {"prompt": ".."} a line.',
    ),
]
Output = Annotated[
    Path | None,
    typer.Option("--output", metavar="FILE", help="Answers to --prompts, a JSON line each."),
]
Overwrite = Annotated[
    bool,
    typer.Option("--overwrite", hidden=True, help="Replace an output that is there already."),
]
Concurrency = Annotated[
    int | None,
    typer.Option(
        "--concurrency", metavar="INTEGER", min=1, hidden=True, help="Prompts answered at once."
    ),
]
KvMemory = Annotated[
    str | None,
    typer.Option(
        "--kv-memory",
        metavar="SIZE",
        hidden=True,
        help="For keys and values of many prompts: 500MB, 2GB. Built in: half of what is free.",
    ),
]


@with_flags(*SHARED)
def generate(
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT", help="The question; without it, --file or standard input."
        ),
    ] = None,
    *,
    file: Annotated[
        Path | None, typer.Option("--file", metavar="FILE", help="Read the prompt from a file.")
    ] = None,
    prompts: Prompts = None,
    output: Output = None,
    overwrite: Overwrite = False,
    concurrency: Concurrency = None,
    kv_memory: KvMemory = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt, without chat template.")
    ] = False,
    system: common.SystemPrompt = None,
    config: common.ConfigFile = None,
    stats: common.ShowStats = None,
    as_json: common.AsJson = False,
    flags: dict[str, Any],
) -> None:
    """Answer a prompt, or a file of them. Drafts change no token."""
    if raw and system is not None:
        raise InvalidOption("--raw and --system at once: a raw prompt has no messages")
    asked = settings(config, flags)
    asked.generation["raw"] = raw
    if prompts is not None or output is not None:
        if prompt is not None or file is not None:
            raise InvalidOption("--prompts and another prompt at once. Leave one of them out")
        room = many.Room.of(concurrency, kv_memory)
        reads = (prompts, config, *flags.values())
        _answer_file(prompts, output, asked, system, room, overwrite=overwrite, reads=reads)
        return
    if concurrency is not None or kv_memory is not None:
        raise InvalidOption("--concurrency and --kv-memory are for --prompts. Leave them out")
    text = common.read_prompt(prompt, file, raw=raw)
    speculator = common.load(asked)
    messages: Messages = text if raw else common.conversation(text, system)
    if as_json:
        answer = speculator.generate(messages, **asked.generation)
        common.emit(json.dumps(record(speculator, answer, asked)) + "\n")
    else:
        answer = write(speculator, messages, asked.generation)
        common.say_if_cut(answer, asked.generation)
    if stats is not None:
        common.note(common.statistics(answer, stats))


def _answer_file(
    prompts: Path | None,
    output: Path | None,
    asked: Settings,
    system: str | None,
    room: many.Room,
    *,
    overwrite: bool,
    reads: tuple[object, ...],
) -> None:
    """`--prompts` and `--output`."""
    if prompts is None or output is None:
        raise InvalidOption("--prompts and --output go together. Give both")
    files.check_file(output, overwrite=overwrite, reads=reads)
    found = many.read(prompts, system=system, raw=asked.generation["raw"])
    counts = many.answer(found, asked, output, room, overwrite=overwrite)
    failed = f", {counts['errors']} without an answer" if counts["errors"] else ""
    common.emit(f"{output}: {counts['answers']} answers, {counts['tokens']} tokens{failed}\n")


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
    heads = speculator.heads
    found = None if heads is None or heads.folder is None else heads_name(heads.folder)
    return {
        "text": answer.text,
        "token_ids": answer.token_ids,
        "stop_reason": answer.stop_reason,
        "stats": answer.stats.to_dict(),
        "model": speculator.label,
        "heads": None if heads is None else asked.loading.get("heads") or found,
        "options": speculator.options.described() | asked.generation,
    }
