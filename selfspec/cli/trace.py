"""`selfspec trace`: a prompt in, what layers made of its answer out; or a record of a suite."""

from __future__ import annotations

import contextlib
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from selfspec import files
from selfspec.cli import common, recording
from selfspec.cli.flags import Flag, grouped, inputs, merged, option_flags, with_flags
from selfspec.cli.settings import GENERATION, LOADING, SPECULATION, sorted_settings
from selfspec.config import DEFAULT_MAX_NEW_TOKENS
from selfspec.errors import InvalidOption
from selfspec.eval.options import RecordOptions

if TYPE_CHECKING:
    from selfspec.api.speculator import Speculator
    from selfspec.api.text import Prompt
    from selfspec.decoding.prices import Costs
    from selfspec.eval.record import Record
    from selfspec.visualise.layers import LayerTrace

_RECORDING = option_flags(RecordOptions)
_LOOKING = (*SPECULATION, *GENERATION)
_SHARED_NAMES = {flag.name for flag in _RECORDING} & {flag.name for flag in _LOOKING}
ONLY_RECORD = grouped(
    "Record",
    (*recording.SUITE, *(flag for flag in _RECORDING if flag.name not in _SHARED_NAMES)),
)
"""Flags that mean something with --record only."""
CARD = Flag("card", str, "PNG to share: the answer and one number.")
REJECTED = Flag("rejected", bool, "Show rejected drafts, too.")
OVERWRITE = Flag("overwrite", bool, "Replace what an earlier trace wrote there.")
VIEW = (
    Flag("html", str, "File for a page to explore."),
    Flag("output", str, "File to keep the trace in, one JSON record per line."),
    CARD,
    Flag("all_layers", bool, "Layers without heads too. Built in: on."),
)
TARGETS = {flag.name for flag in VIEW} - {"all_layers"}
"""Flags that name files to write."""
ONLY_VIEW = (*VIEW, REJECTED, *(flag for flag in _LOOKING if flag.name not in _SHARED_NAMES))
"""Flags that mean nothing with --record."""
FLAGS = (
    *VIEW,
    REJECTED,
    OVERWRITE,
    Flag("record", str, "Folder for a record of a prompt or suite, which selfspec tune reads."),
    *LOADING,
    *_LOOKING,
    *ONLY_RECORD,
)


@with_flags(*FLAGS)
def trace(
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="PROMPT", help="The question; without it, standard input."),
    ] = None,
    *,
    kept: Annotated[
        Path | None,
        typer.Option("--from", metavar="FILE", help="Show what --output kept, without a prompt."),
    ] = None,
    config: common.ConfigFile = None,
    as_json: common.AsJson = False,
    flags: dict[str, Any],
) -> None:
    """Show who gave each token of an answer. And what each layer would have said, and how sure.

    With --record: decode plainly and record what every exit layer would have drafted.
    """
    given = merged(config, flags, FLAGS, defaults=False)
    asked = merged(config, flags, FLAGS) if kept is None else given
    if prompt is not None and kept is not None:
        raise InvalidOption("a prompt and --from at once, expected one. Leave one of them out")
    if kept is not None:
        shown = (CARD, REJECTED, OVERWRITE)
        others = tuple(flag for flag in FLAGS if flag not in shown and flag.name != "html")
        refuse(given, others, "with --from: the answer is written already")
    if "record" in asked:
        refuse(given, ONLY_VIEW, "with --record")
        recording.keep(prompt, asked, as_json=as_json)
        return
    refuse(given, ONLY_RECORD, "without --record")
    check_targets(asked, inputs(asked, kept, config))
    with contextlib.ExitStack() as stack:
        for name in TARGETS & asked.keys():
            stack.enter_context(files.locked(asked[name]))
        found = read(kept) if kept is not None else looked(prompt, asked)
        write(found, asked)
    show(found.trace, as_json=as_json, rejected=asked.get("rejected", False))


def refuse(asked: dict[str, Any], flags: tuple[Flag, ...], where: str) -> None:
    """Raise InvalidOption at the first of `flags` that was given."""
    for flag in flags:
        if flag.name in asked:
            name = flag.as_typed(asked[flag.name])
            raise InvalidOption(f"{name} means nothing {where}. Leave it out")


def check_targets(asked: dict[str, Any], reads: list[object]) -> None:
    """Make paths of the outputs' names, before any work. Raises InvalidOption, CannotWrite."""
    for name in sorted(TARGETS & asked.keys()):
        overwrite = asked.get("overwrite", False)
        path = files.check_file(asked[name], overwrite=overwrite, reads=reads)
        check_target(name, path)
        if path in asked.values():
            raise InvalidOption(f"{path} is named for two outputs. Name another file")
        asked[name] = path


def check_target(name: str, path: Path) -> None:
    """Raise InvalidOption where the folder is missing, or the suffix does not say the kind."""
    flag = f"--{name}"
    if not path.parent.is_dir():
        raise InvalidOption(f"{flag} {path}: there is no folder {path.parent}. Make it first")
    if name == "output":
        return
    suffix = ".png" if name == "card" else f".{name}"
    if path.suffix != suffix:
        raise InvalidOption(f"{flag} {path}: expected a name that ends in {suffix}")
    if name != "html" and importlib.util.find_spec("matplotlib") is None:
        raise InvalidOption(f"{flag} needs matplotlib. Install it: pip install 'selfspec[eval]'")


class Seen(NamedTuple):
    """A trace, and what its page needs to show other settings."""

    trace: LayerTrace
    record: Record | None = None
    costs: Costs | None = None
    texts: Callable[[int], str] = "#{}".format
    """Of tokens that other settings draft."""
    why: str = ""
    """Why there is no record, and what to do; the page says so."""


def read(kept: Path) -> Seen:
    """A trace from a file."""
    from selfspec.visualise.layers import LayerTrace

    why = (
        "This page was made from a kept trace, which does not hold what other settings would have "
        "drafted. A page made with the answer has sliders: selfspec trace --html PAGE.html PROMPT"
    )
    return Seen(LayerTrace.load(kept), why=why)


def looked(prompt: str | None, asked: dict[str, Any]) -> Seen:
    """Decode, and look at what each layer made of it."""
    chosen = sorted_settings(asked)
    text = common.read_prompt(prompt, None, raw=False)
    speculator = common.load(chosen)
    from selfspec.visualise.inspect import inspect

    found = inspect(speculator, text, all_layers=asked.get("all_layers", True), **chosen.generation)
    if "html" not in asked:
        return Seen(found)
    return replayable(speculator, text, found, asked.get("max_new_tokens"))


def replayable(speculator: Speculator, prompt: Prompt, found: LayerTrace, most: int | None) -> Seen:
    """With what other settings would have drafted, and what layers cost here.

    `most`: the limit of new tokens that was asked for. Says so where plain decoding gives another
    answer: then nothing can be replayed.
    """
    from selfspec.decoding.measure import measure
    from selfspec.visualise.inspect import branches
    from selfspec.visualise.page import most_rows
    from selfspec.visualise.texts import TokenTexts

    why = ""
    try:
        record = branches(speculator, prompt, most or DEFAULT_MAX_NEW_TOKENS, found.info.settings)
        if record.answers.tolist() != [place.token for place in found.places]:
            why = (
                "greedy decoding without drafts gives another answer. Try --pinned, without "
                "sampling, penalties or a grammar"
            )
    except InvalidOption as error:
        why = str(error)
    if why:
        why = f"the page cannot replay settings: {why}"
        common.note(f"selfspec: {why}")
        return Seen(found, why=f"{why[0].upper()}{why[1:]}.")
    rows, context = most_rows(found, record), record.mean_context
    costs = measure(speculator.backbone, speculator.heads, rows=rows, context=context)
    return Seen(found, record, costs, TokenTexts(speculator.tokenizer).of)


def write(seen: Seen, asked: dict[str, Any]) -> None:
    """Keep the trace, draw it."""
    found = seen.trace
    if "output" in asked:
        found.save(asked["output"])
    if "card" in asked:
        from selfspec.visualise import picture

        picture.save_card(found, asked["card"], seen.costs)
    if "html" in asked:
        from selfspec.visualise.page import render

        files.write(asked["html"], render(*seen))


def show(found: LayerTrace, *, as_json: bool, rejected: bool) -> None:
    """The trace on standard output."""
    if as_json:
        common.emit("".join(json.dumps(line) + "\n" for line in found.lines()))
    else:
        from selfspec.visualise import terminal

        common.emit(
            common.printed(lambda console: terminal.show(found, console, rejected=rejected))
        )
