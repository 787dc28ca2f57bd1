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
    folders = hub.list_heads()
    rows = []
    for folder in (*folders, *(other for other in known_folders() if other not in folders)):
        try:
            config = read_config(folder)
        except InvalidHeads as error:
            base.complain(error)
            continue
        fields = {name: config[name] for name in ("base_model", "exit_layers", "head_type")}
        num_bytes = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
        rows.append({"name": hub.heads_name(folder), **fields, "size_bytes": num_bytes})
    if as_json:
        base.emit_json(rows)
        return
    from rich.table import Column, Table

    name = Column("name", overflow="fold")
    grid = Table(name, "base model", "exit layers", "type", "MB", box=None, pad_edge=False)
    for row in rows:
        *cells, size = map(base.words, row.values())
        grid.add_row(*cells, f"{int(size) / 1e6:.1f}")
    base.emit(base.table_text(grid))


@app.command()
def show(folder: Folder, *, as_json: AsJson = False) -> None:
    """Show the config of a heads folder; the weights are not read."""
    path = hub.resolve_heads(folder)
    from selfspec.heads.attending import config_of  # a wrong name costs no torch import

    config = asdict(config_of(path))
    if as_json:
        base.emit_json(config)
        return
    if config["chat_template"] is not None:
        config["chat_template"] = name_of(config["chat_template"])
    if "before" in config["training"]:  # fits of which each holds the one before it
        config["training"]["before"] = "an earlier fit, which --json shows"
    base.emit_facts({name: value for name, value in config.items() if value not in (None, {})})


@app.command()
def check(
    folder: Folder,
    *,
    model: Annotated[
        str | None, typer.Option(help="The model of the heads. Default: the bundled one.")
    ] = None,
) -> None:
    """Check heads: files complete, card up to date, fit for the model. Exit code 1 if not."""
    path = hub.resolve_heads(folder)
    from selfspec.api import speculator as api  # imports torch

    # heads that others publish have no card of ours
    problems = [] if attends(path) and not is_heads_folder(path) else folder_problems(path)
    try:
        speculator = api.load(model, heads=path, costs="row=0")  # nothing is measured
    except (InvalidHeads, HeadsMismatch, InvalidOption) as error:
        hint = "" if model or not isinstance(error, HeadsMismatch) else " (--model names another)"
        problems.append(f"{error}{hint}")
    for problem in dict.fromkeys(problems):
        base.emit(f"failed: {problem}\n")
    if problems:
        raise typer.Exit(1)
    config = read_config(path)
    kind = ""
    if attends(path):
        layers, layer = base.words(config["state_layers"] or "the usual"), config["layer"]
        kind = (
            f" (EAGLE-3, {config['format']} format, {layer['model_type']} layer, states of "
            f"{layers} layers, {config['draft_vocab_size']} of {config['vocab_size']} tokens)"
        )
    elif count := config.get("num_heads"):
        kind = f" ({config['head_type']}, {count} heads, each a token further ahead)"
    base.emit(f"OK: {path.name}{kind} fit {speculator.label}\n")


@app.command()
def use(folder: Folder) -> None:
    """From now on, use these heads with the model whose weights they were fitted to."""
    path = hub.resolve_heads(folder)
    config = read_config(path)
    base_model = config["base_model"]
    if not remember(path, chosen=True):
        raise InvalidOption(f"{path} has no fingerprint of its model. Give --heads each time")
    name = hub.heads_name(path)
    base.emit(f"{name} are used with the weights of {base_model}; without: --heads none\n")
    options = SpeculationOptions().updated(config["defaults"])
    if not options.uses("exit"):
        reason = f"by calibration they gain nothing, so {options.drafter} drafts"
        base.emit(f"{reason}; else: --drafter {FITTED}\n")


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
                    with files.open_bytes(file) as original, (new / file.name).open("wb") as copy:
                        shutil.copyfileobj(original, copy)
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
        problem = f"{name!r} is no hub id, expected OWNER/NAME"
        raise InvalidOption(f"{problem}. To keep heads on this machine, copy the folder")
    path = hub.resolve_heads(folder)
    if problems := folder_problems(path):
        raise InvalidHeads(f"{path} is not complete: {problems[0]}. See: selfspec heads check")
    from selfspec.training import records

    if licence is None:
        base.note("selfspec: the card names no licence. To name one: --license apache-2.0")
    content = records.hub_files(path, name, licence)
    address = hub.push(content, name, private=private, message=message)
    base.emit(f"{address}\n")


def folder_problems(folder: Path) -> list[str]:
    """Problems of a folder of fitted heads, in words: missing files or an outdated card."""
    from selfspec.training import records

    if missing := [f"no {name}" for name in records.FILES if not (folder / name).is_file()]:
        return missing
    card = files.read_bytes(folder / "README.md").decode("utf-8", "replace")
    match = re.search(r'custom_generate="(.+?)"', card)  # a push adds this, and a licence above
    try:
        expected = records.card_of(folder, heads=match[1] if match else "HEADS")
    except (InvalidHeads, InvalidData) as error:
        return [str(error)]
    header = re.compile(r"\A---\n.*?\n---\n", re.DOTALL)
    same = header.sub("", card) == header.sub("", expected)
    return [] if same else ["README.md is not the card that the records make"]
