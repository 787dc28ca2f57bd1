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
    str, typer.Option("--output", metavar="DIR", help="Folder to write the report to.")
]


Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace the report that the output holds.")
]


def report(folders: Folders, *, output: Output, overwrite: Overwrite = False) -> None:
    """Gather measured runs into one report. Writes one page and one Markdown file."""
    from selfspec import files
    from selfspec.eval import report as reporting

    place = reporting.check_free(output, len(folders), overwrite=overwrite)
    runs = [reporting.read_results(folder) for folder in folders]
    with files.locked(place):
        pages = reporting.write(runs, place)
    common.emit("".join(f"{page}\n" for page in pages))
