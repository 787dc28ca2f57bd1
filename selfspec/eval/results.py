"""The folder of a measured run: what was asked and on which machine, then what was found.

Called by `selfspec bench`; `selfspec report` reads it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from selfspec import files
from selfspec.errors import InvalidData, InvalidOption
from selfspec.eval.answers import ANSWERS, TUNING
from selfspec.eval.tables import as_csv, markdown, tables
from selfspec.untrusted import read_json, read_yaml

RUN, SUMMARY = "run.yaml", "summary.json"
FILES = (RUN, ANSWERS, TUNING, SUMMARY, "table.md", "table.csv")


class Results(NamedTuple):
    """What a finished folder holds."""

    name: str
    run: dict[str, Any]
    summary: dict[str, Any]


def check_free(
    folder: str | Path, *, overwrite: bool, resume: bool, reads: Iterable[object] = ()
) -> Path:
    """The folder. Raises CannotWrite, InvalidOption for results that nobody gave up."""
    if overwrite and resume:
        raise InvalidOption("--overwrite and --resume at once, expected one")

    def is_run(folder: Path) -> bool:
        return (folder / RUN).exists() and files.written_here(folder / RUN)

    folder = files.check_folder(folder, FILES, is_run, overwrite=True, reads=reads)
    if is_run(folder) and not (overwrite or resume):
        raise InvalidOption(f"{folder} holds results. Give --resume, --overwrite or another folder")
    return folder


def begin(folder: Path, run: Mapping[str, Any], *, resume: bool) -> None:
    """Make the folder and say what will be measured, or check that a run to go on with is the same.

    Without `resume` what an earlier run left is removed. Raises InvalidOption for another run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / RUN
    if resume and path.exists():
        earlier = _mapping(read_yaml(path), path)
        for part, values in run.items():
            for name, value in values.items():
                if (before := _mapping(earlier.get(part), path).get(name)) != value:
                    raise InvalidOption(
                        f"cannot resume {folder}: {part} {name} was {before}, now it is {value}"
                    )
        return
    text = yaml.safe_dump(dict(run), sort_keys=False, allow_unicode=True)
    with files.replacing(path) as new:  # a full disk is met before anything is removed
        new.write_text(f"# written by selfspec bench\n{text}", encoding="utf-8")
        for name in FILES[1:]:
            (folder / name).unlink(missing_ok=True)


def write(folder: Path, summary: Mapping[str, Any]) -> str:
    """Write the figures as JSON, Markdown and CSV; returns the Markdown."""
    text = "\n".join(markdown(table) for table in tables(summary))
    files.write(folder / SUMMARY, json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
    files.write(folder / "table.csv", as_csv(summary))
    files.write(folder / "table.md", text)
    return text


def read(folder: Path) -> Results:
    """Raises InvalidData where a finished run is expected and is none."""
    try:
        run = _mapping(read_yaml(folder / RUN), folder / RUN)
        summary = _mapping(read_json(folder / SUMMARY), folder / SUMMARY)
    except InvalidData as error:
        raise InvalidData(f"{folder} holds no finished run of selfspec bench: {error}") from error
    return Results(folder.resolve().name, run, summary)


def _mapping(values: Any, path: Path) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise InvalidData(f"{path} has a {type(values).__name__}, expected names and values")
    return values
