"""`selfspec report`: folders of results in, one page in Markdown and in HTML out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from selfspec.cli import common

Folders = Annotated[
    list[Path], typer.Argument(metavar="DIR..", help="Results folders of selfspec bench.")
]
Output = Annotated[
    Path, typer.Option("--output", metavar="DIR", help="Folder to write the report to.")
]


def report(folders: Folders, *, output: Output) -> None:
    """Gather tables and figures of measured runs into one report."""
    from selfspec.eval import report as reporting
    from selfspec.eval import results

    pages = reporting.write([results.read(folder) for folder in folders], output)
    common.emit("".join(f"{page}\n" for page in pages))
