"""`selfspec heads`: list, show, check, use, fetch and share exit heads."""

from __future__ import annotations

import re
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from selfspec import files
from selfspec.api.chat_template import name_of
from selfspec.cli import base
from selfspec.cli.base import AsJson
from selfspec.config import SpeculationOptions
from selfspec.errors import CannotWrite, HeadsMismatch, InvalidData, InvalidHeads, InvalidOption
from selfspec.heads.folder import attends, is_heads_folder, known_folders, read_config, remember
from selfspec.hub import models as hub
from selfspec.options import FITTED

app = typer.Typer()

Folder = Annotated[str, typer.Argument(metavar="DIR", help="A folder of heads, or a known name.")]


@app.callback(invoke_without_command=True)
def heads(context: typer.Context) -> None:
    """List, show, check, use, fetch and share exit heads."""
    if context.invoked_subcommand is None:
        base.emit(context.get_help() + "\n")


@app.command("list")
def list_command(*, as_json: AsJson = False) -> None:
    """List exit heads. These come with selfspec, were pulled, or were fitted here."""
    coming = hub.list_heads()
    rows = []
    for folder in (*coming, *(own for own in known_folders() if own not in coming)):
        try:
            config = read_config(folder)
        except InvalidHeads as error:
            base.complain(error)
            continue
        said = {name: config[name] for name in ("base_model", "exit_layers", "head_type")}
        count = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
        rows.append({"name": hub.heads_name(folder), **said, "size_bytes": count})
    if as_json:
        base.emit_json(rows)
        return
    from rich.table import Column, Table

    name = Column("name", overflow="fold")
    grid = Table(name, "base model", "exit layers", "type", "MB", box=None, pad_edge=False)
    for row in rows:
        *first, size = map(base.words, row.values())
        grid.add_row(*first, f"{int(size) / 1e6:.1f}")
    base.emit(base.rendered(grid))


@app.command()
def show(folder: Folder, *, as_json: AsJson = False) -> None:
    """Show the config of a heads folder; the weights are not read."""
    found = hub.resolve_heads(folder)
    from selfspec.heads.attending import config_of  # a wrong name costs no torch import

    values = asdict(config_of(found))
    if as_json:
        base.emit_json(values)
        return
    if values["chat_template"] is not None:
        values["chat_template"] = name_of(values["chat_template"])
    if "before" in values["training"]:  # fits of which each holds the one before it
        values["training"]["before"] = "an earlier fit, which --json shows"
    base.emit_facts({name: value for name, value in values.items() if value not in (None, {})})


@app.command()
def check(
    folder: Folder,
    *,
    model: Annotated[
        str | None, typer.Option(help="The model of the heads. Default: the bundled one.")
    ] = None,
) -> None:
    """Check heads: files complete, card up to date, fit for the model. Exit code 1 if not."""
    found = hub.resolve_heads(folder)
    from selfspec.api import speculator as generate  # imports torch

    # heads that others publish have no card of ours
    problems = [] if attends(found) and not is_heads_folder(found) else incomplete(found)
    try:
        speculator = generate.load(model, heads=found, costs="row=0")  # nothing is measured
    except (InvalidHeads, HeadsMismatch, InvalidOption) as error:
        why = "" if model or not isinstance(error, HeadsMismatch) else " (--model names another)"
        problems.append(f"{error}{why}")
    for problem in dict.fromkeys(problems):
        base.emit(f"failed: {problem}\n")
    if problems:
        raise typer.Exit(1)
    config = read_config(found)
    kind = ""
    if attends(found):
        layers, layer = base.words(config["state_layers"] or "the usual"), config["layer"]
        kind = (
            f" (EAGLE-3, {config['format']} format, {layer['model_type']} layer, states of "
            f"{layers} layers, {config['draft_vocab_size']} of {config['vocab_size']} tokens)"
        )
    elif count := config.get("num_heads"):
        kind = f" ({config['head_type']}, {count} heads, each a token further ahead)"
    base.emit(f"OK: {found.name}{kind} fit {speculator.label}\n")


@app.command()
def use(folder: Folder) -> None:
    """From now on, use these heads with the model whose weights they were fitted to."""
    found = hub.resolve_heads(folder)
    config = read_config(found)
    base_model = config["base_model"]
    if not remember(found, chosen=True):
        raise InvalidOption(f"{found} has no fingerprint of its model. Give --heads each time")
    name = hub.heads_name(found)
    base.emit(f"{name} are used with the weights of {base_model}; without: --heads none\n")
    options = SpeculationOptions().updated(config["defaults"])
    if not options.uses("exit"):
        why = f"by calibration they gain nothing, so {options.drafter} drafts"
        base.emit(f"{why}; else: --drafter {FITTED}\n")


@app.command()
def pull(
    name: Annotated[str, typer.Argument(metavar="ID", help="A hub id, or a folder to copy.")],
    *,
    called: Annotated[
        str | None, typer.Option("--as", metavar="NAME", help="Name for a folder; else its own.")
    ] = None,
    overwrite: base.Overwrite = False,
) -> None:
    """Fetch heads. --heads finds them by OWNER/NAME or NAME from then on."""
    source, target = hub.heads_to_pull(name, called)
    from selfspec.heads.attending import config_of

    if target.resolve() == source.resolve():
        base.emit(f"{target.name} is there already: {target}\n")
        return
    copied = target.parent == hub.pulled_heads()  # their names do not say where they came from
    for path in (source / name for name in hub.HEADS_FILES if copied):
        if path.is_symlink() or (path.exists() and not path.is_file()):  # it may lead anywhere
            raise InvalidHeads(f"{path} is not a regular file. Put a copy of the file there")
    config_of(source)  # refuses what is no folder of heads
    if copied and target.exists() and not overwrite:
        raise CannotWrite(f"there are heads called {target.name}. Give --as NAME, or --overwrite")
    with files.locked(target, wait=True):
        files.check_folder(
            target,
            hub.HEADS_FILES,
            lambda folder: attends(folder) or is_heads_folder(folder),
            overwrite=overwrite or not copied,
        )
        with files.replacing_folder(target) as new:
            for file in (source / entry for entry in hub.HEADS_FILES):
                if file.exists():
                    with files.open_bytes(file) as opened, (new / file.name).open("wb") as copy:
                        shutil.copyfileobj(opened, copy)
    remember(target)
    base.emit(f"{hub.heads_name(target)}: {target}\n")


@app.command()
def push(
    folder: Folder,
    name: Annotated[str, typer.Argument(metavar="ID", help="On the hub: OWNER/NAME.")],
    *,
    private: Annotated[bool, typer.Option("--private", help="Make a new repo private.")] = False,
    licence: Annotated[
        str | None, typer.Option("--license", metavar="ID", help="Licence of the card: apache-2.0.")
    ] = None,
    message: Annotated[
        str, typer.Option("--message", metavar="TEXT", help="Message of the commit.")
    ] = "Exit heads, fitted by selfspec",
) -> None:
    """Upload fitted heads to the hub, with their card. Log in before: hf auth login."""
    if "/" not in name or not hub.HUB_ID.fullmatch(name):
        wrong = f"{name!r} is no hub id, expected OWNER/NAME"
        raise InvalidOption(f"{wrong}. To keep heads on this machine, copy the folder")
    found = hub.resolve_heads(folder)
    if problems := incomplete(found):
        raise InvalidHeads(f"{found} is not complete: {problems[0]}. See: selfspec heads check")
    from selfspec.training import records

    if licence is None:
        base.note("selfspec: the card names no licence. To name one: --license apache-2.0")
    content = records.for_others(found, name, licence)
    address = hub.push(content, name, private=private, message=message)
    base.emit(f"{address}\n")


def incomplete(folder: Path) -> list[str]:
    """Problems of a folder of fitted heads, in words: missing files or an outdated card."""
    from selfspec.training import records

    if missing := [f"no {name}" for name in records.FILES if not (folder / name).is_file()]:
        return missing
    found = files.read_bytes(folder / "README.md").decode("utf-8", "replace")
    named = re.search(r'custom_generate="(.+?)"', found)  # a push adds this, and a licence above
    try:
        expected = records.card_of(folder, heads=named[1] if named else "HEADS")
    except (InvalidHeads, InvalidData) as error:
        return [str(error)]
    header = re.compile(r"\A---\n.*?\n---\n", re.DOTALL)
    same = header.sub("", found) == header.sub("", expected)
    return [] if same else ["README.md is not the card that the records make"]
