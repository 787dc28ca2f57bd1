"""The gallery of the docs, made by the very commands that docs/gallery.md shows.

    python -m eval.gallery                 all of it
    python -m eval.gallery code story      some

`selfspec trace --html NAME.html ..` becomes docs/gallery/NAME.jsonl.xz, the trace of which
docs/hooks.py makes the page, and its card, docs/images/gallery/NAME.png. Nothing is timed, so that
pages are the same wherever they are made.
"""

from __future__ import annotations

import lzma
import re
import shlex
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from eval.pictures import small
from selfspec.cli.main import main as selfspec
from selfspec.files import write

DOCS = Path(__file__).parents[1] / "docs"
PAGE, TRACES, PICTURES = DOCS / "gallery.md", DOCS / "gallery", DOCS / "images" / "gallery"

_COMMAND = re.compile(r"^selfspec (trace --html .*)", re.MULTILINE)


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Without it, all.")] = None,
) -> None:
    """Ask the default model, keep what the pages and pictures need."""
    for folder in (TRACES, PICTURES):
        folder.mkdir(exist_ok=True)
    for words in commands():
        target = Path(words[2])
        if names and target.stem not in names:
            continue
        picture = PICTURES / f"{target.stem}.png"
        page(words[3:], TRACES / f"{target.stem}.jsonl.xz", picture)
        small(picture)


def commands() -> list[list[str]]:
    """Words of each command behind `selfspec`, the target third."""
    text = PAGE.read_text(encoding="utf-8").replace("\\\n", "")
    return [shlex.split(line, comments=True) for line in _COMMAND.findall(text)]


def page(asked: list[str], kept: Path, card: Path) -> None:
    """What a page is made of, and its card."""
    with tempfile.TemporaryDirectory() as scratch:
        trace = Path(scratch, "trace.jsonl")
        run(["trace", "--output", str(trace), "--card", str(card), "--overwrite", *asked])
        write(kept, lzma.compress(trace.read_bytes(), preset=9 | lzma.PRESET_EXTREME))


def run(words: list[str]) -> None:
    """Raises RuntimeError if the command fails."""
    if selfspec(words):
        raise RuntimeError(f"selfspec {shlex.join(words)}")


if __name__ == "__main__":
    typer.run(main)
